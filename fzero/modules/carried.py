"""A module's buffers as values: copies of those that a call is given, and what the call has made of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from fzero.base.arguments import named
from fzero.capture.handle import Function
from fzero.capture.surroundings import Surroundings
from fzero.engine.dispatch import call_unit
from fzero.modules.places import Place, Places


class Carried:
    """Where a module's buffers stand.

    Args:
        elsewhere: `places_of` its buffers.
    """

    def __init__(self, module: nn.Module, elsewhere: Mapping[int, list[Place]]) -> None:
        self._places = Places(module, elsewhere, registry="_buffers")
        first = {id(x): name for name, x in module.named_buffers()}
        every = module.named_buffers(remove_duplicate=False)
        self._first = {name: first[id(x)] for name, x in every}  # every name of a buffer -> its first one

    @contextlib.contextmanager
    def carrying(self, buffers: object) -> Iterator[dict[str, torch.Tensor]]:
        """Inside, the module's buffers are copies of these; the dict is filled with what they are at the end."""
        own = self._checked(buffers)
        copies = {name: x.clone() for name, x in own.items()}
        new: dict[str, torch.Tensor] = {}
        with self._places.installed({name: copies[first] for name, first in self._first.items()}):
            yield new
            for name in own:
                registry, key = self._places.of[name]
                x = registry.get(key)
                if not isinstance(x, torch.Tensor) or (x.shape, x.dtype) != (own[name].shape, own[name].dtype):
                    raise ValueError(
                        f"apply: the module's forward left {named(x)} in the place of its buffer {name!r}, expected a "
                        f"tensor like the one that it was given, {named(own[name])}."
                    )
                new[name] = x

    def now(self) -> dict[str, torch.Tensor]:
        """The buffers that stand in the module."""
        places = {name: self._places.of[name] for name in dict.fromkeys(self._first.values())}
        return {name: registry[key] for name, (registry, key) in places.items()}

    def put(self, new: Mapping[str, torch.Tensor]) -> None:
        """Lets others stand there, until the end of the call."""
        for name, first in self._first.items():
            registry, key = self._places.of[name]
            registry[key] = new[first]

    def _checked(self, buffers: object) -> dict[str, torch.Tensor]:
        known = dict.fromkeys(self._first.values())
        given = dict(buffers) if isinstance(buffers, Mapping) else None
        if (
            given is None
            or given.keys() != known.keys()
            or not all(isinstance(x, torch.Tensor) for x in given.values())
        ):
            got = named(buffers) if given is None else f"a dict of {sorted(given)}"
            raise ValueError(
                f"apply: got buffers={got}, expected a dict of tensors by the names of the module's buffers, "
                f"{sorted(known)}, behind the params: apply(params, buffers, *args), as fz.functional(module, "
                "buffers=True) and apply return them."
            )
        return given


def call_carrying(
    carried: Carried | None,
    call: Function,
    given: tuple[object, ...],
    seed: int | None,
    fast: Function,
    surroundings: Surroundings,
    around: Callable[..., contextlib.AbstractContextManager[None]],
) -> object:
    """What a unit returns; its buffers, where they are carried, are operands and outputs of it, as it may run again.

    Args:
        given: leaves, args, kwargs.
    """
    if carried is None:
        return call_unit(call, given, {}, seed, fast, surroundings, around)

    def carrying(call: Function, leaves: object, buffers: object, *others: object) -> object:
        with carried.carrying(buffers) as new:
            out = call(leaves, *others)
        return out, new

    own, quick = functools.partial(carrying, call), functools.partial(carrying, fast)
    out, new = call_unit(own, (given[0], carried.now(), *given[1:]), {}, seed, quick, surroundings, around)
    carried.put(new)
    return out
