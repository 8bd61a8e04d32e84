"""A module's buffers as values: copies of those that a call is given, and what the call has made of them."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from fzero.base import texts
from fzero.base.arguments import named
from fzero.base.refusals import noted
from fzero.engine.dispatch import call_unit
from fzero.engine.outlets import overlap
from fzero.modules.places import Places
from fzero.modules.private_copy import Constant
from fzero.parallel.batch_norm import need_moved_alike, others_in, ranks_of_means
from fzero.table.handle import Function, storage_of


def values_of(module: nn.Module, remove_duplicate: bool = True) -> dict[str, torch.Tensor]:
    """The buffers that are values of a call: all but sparse ones in compressed form, which stay constants.

    torch.func goes through operations of those nowhere but in units.
    """
    named_buffers = module.named_buffers(remove_duplicate=remove_duplicate)
    return {name: x for name, x in named_buffers if x.layout not in texts.COMPRESSED}


def need_apart(module: nn.Module, constants: Sequence[Constant]) -> None:
    """Refuses buffers that share memory with something else, as each would be a value by itself."""
    buffers = [(f"buffer {name!r}", x) for name, x in values_of(module).items()]
    params = [(f"param {name!r}", x) for name, x in module.named_parameters()]
    held = collections.defaultdict[int, list[tuple[str, torch.Tensor]]](list)  # by their memory
    for what, x in (*buffers, *params, *[(constant.label, constant.source) for constant in constants]):
        held[storage_of(x)].append((what, x))
    for name, x in buffers:
        for what, other in held[storage_of(x)] if storage_of(x) else ():
            if x is not other and overlap((x, other)):
                raise ValueError(
                    f"fz.functional(buffers=True): {name} and {what} share memory, and would be two values, "
                    "of which a write to one does not change the other. Compute the view in forward, from the buffer, "
                    "or register a copy (.clone())."
                )


class Carried:
    """Where a module's buffers stand, each under all of its names."""

    def __init__(self, module: nn.Module, synchronises: bool) -> None:
        self.places = Places(module, registry="_buffers")
        every = values_of(module, remove_duplicate=False)
        first = {id(x): name for name, x in values_of(module).items()}
        self._first = {name: first[id(x)] for name, x in every.items()}  # every name of a buffer -> its first one
        self._owners = {name: id(registry) for name, (registry, _) in self.places.of.items()}
        alike = others_in(module) if synchronises else ()
        self._alike = [name for name in self.names if name in alike]

    def of(self, module: nn.Module) -> Carried:
        """Those among them that a module below has itself."""
        registries = {id(own._buffers) for own in module.modules()}
        firsts = {first for name, first in self._first.items() if self._owners[name] in registries}
        own = copy.copy(self)
        own._first = {name: first for name, first in self._first.items() if first in firsts}
        return own

    @contextlib.contextmanager
    def carrying_alike(self, buffers: object) -> Iterator[dict[str, torch.Tensor]]:
        """`carrying` of a whole module, after which all ranks have the same where its batch norms are over ranks."""
        with self.carrying(buffers) as new:
            yield new
        if self._alike:
            need_moved_alike(self._alike, self._checked(buffers), new, ranks_of_means())

    @contextlib.contextmanager
    def carrying(self, buffers: object) -> Iterator[dict[str, torch.Tensor]]:
        """Inside, the module's buffers are copies of these; the dict is filled with what they are at the end."""
        own = self._checked(buffers)
        copies = {name: x.clone() for name, x in own.items()}
        new: dict[str, torch.Tensor] = {}
        with self.places.installed({name: copies[first] for name, first in self._first.items()}):
            try:
                yield new
            except RuntimeError as error:
                if texts.says(error, texts.NO_STATISTICS):
                    raise ValueError(_DIFFERENTIATED) from error
                raise
            for name in own:
                registry, key = self.places.of[name]
                x = registry.get(key)
                if not isinstance(x, torch.Tensor) or (x.shape, x.dtype) != (own[name].shape, own[name].dtype):
                    raise ValueError(
                        f"apply: the module's forward left {named(x)} in the place of its buffer {name!r}, expected a "
                        f"tensor like the one that it was given, {named(own[name])}. Make it so in __init__; where the "
                        "first forward does, as of observers of quantization, call the module once before "
                        "fz.functional."
                    )
                new[name] = x
            for other, name in self._first.items():
                registry, key = self.places.of[other]
                if registry.get(key) is not new[name]:
                    raise ValueError(
                        f"apply: the module's forward put another tensor in the place of its buffer {name!r}, which "
                        f"is also {other!r}, and left the old one there; expected one tensor in both. Write to it in "
                        "place (.copy_()), or assign both."
                    )

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(self._first.values()))

    def now(self) -> dict[str, torch.Tensor]:
        """The buffers that stand in the module."""
        places = {name: self.places.of[name] for name in self.names}
        return {name: registry[key] for name, (registry, key) in places.items()}

    def put(self, new: Mapping[str, torch.Tensor]) -> None:
        """Lets others stand there, until the end of the call."""
        for name, first in self._first.items():
            registry, key = self.places.of[name]
            registry[key] = new[first]

    def undo(self) -> Callable[[], None]:
        """Notes the buffers; what it returns puts them back."""
        return functools.partial(self.put, self.now())

    def alone(self, call: Function, *args: object, **kwargs: object) -> object:
        """What a call returns; the buffers are those that it has left, unless it was refused and runs again."""
        kept: dict[str, torch.Tensor] = {}
        try:
            with self.carrying(self.now()) as new:
                try:
                    out = call(*args, **kwargs)
                except Exception as error:
                    again = isinstance(error, RuntimeError) and texts.says(error, *texts.REFUSED)
                    kept = {} if again else self.now()
                    raise
            kept = new
            return out
        finally:
            if kept:
                self.put(kept)

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


_DIFFERENTIATED = (
    "apply: its buffers are differentiated, and no gradient flows into a batch norm's running statistics. Where they "
    "are an input of a step, say which inputs have cotangents: step.vjp(state, buffers, x, argnums=(1,)); in "
    "torch.func, which arguments: torch.func.grad(fn, argnums=0). Or let the step keep them: fz.carry(step, buffers)."
)


def call_carrying(
    carried: Carried | None,
    call: Function,
    given: tuple[object, ...],
    seed: int | None,
    fast: Callable[[], Function],
    around: Callable[..., contextlib.AbstractContextManager[None]],
) -> object:
    """What a unit returns; its buffers, where they are carried, are operands and outputs of it, as it may run again."""
    if carried is None:
        return call_unit(call, given, {}, seed, fast, around)

    def carrying(call: Function, leaves: object, buffers: object, *others: object) -> object:
        with carried.carrying(buffers) as new:
            out = call(leaves, *others)
        return out, new

    own, compilable = functools.partial(carrying, call), lambda: functools.partial(carrying, fast())
    try:
        out, new = call_unit(own, (given[0], carried.now(), *given[1:]), {}, seed, compilable, around)
    except Exception as error:
        if carried.names:
            error.add_note("A unit raised this whose buffers are values; what it had written to them is lost.")
            noted(error)  # so that nobody goes on without
        raise
    carried.put(new)
    return out
