"""The forms of a unit's calls whose first run was pure: later ones of such a form go straight."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from fzero.base import private, pytree
from fzero.base.node import OWNER
from fzero.capture.contents import tensors_in
from fzero.capture.handle import Handle
from fzero.capture.notes import notes
from fzero.capture.watch import is_watch
from fzero.engine.call import Call
from fzero.engine.traversal import Traversal
from fzero.stores.put import Memory

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
ROUTES = 8  # forms of one call that are kept


class Route:
    """The form of a call whose first run was pure.

    Attributes:
        keys: the groups of its leaves, in order.
        handles: for each leaf, its place among the flat arguments and its index.
        primals: for each key, the place of one of its leaves.
        tensors: the places of its tensors.
        wanted: the positions of what is differentiated, keys first and then tensors.
        opaque: the types of what it returns beside tensors, numbers and strings.
        casts: the dtype of its autocast.
    """

    def __init__(
        self,
        call: Call,
        flat: Sequence[object],
        spec: pytree.Spec,
        remat: bool,
        memory: Memory,
        opaque: Collection[type],
        casts: torch.dtype | None,
    ) -> None:
        self.opaque, self.casts = opaque, casts
        self.reruns = call.reach.names(_RERUN)
        self.spec, self.keys, self.traits = spec, tuple(call.primals), call.facts
        self.unit, self.remat, self.memory = call.unit, remat, memory
        self.handles = [(place, x.index) for place, x in enumerate(flat) if isinstance(x, Handle)]
        first = {x.key: place for place, x in reversed([*enumerate(flat)]) if isinstance(x, Handle)}
        self.primals = [first[key] for key in self.keys]
        self.tensors = [p for p, x in enumerate(flat) if isinstance(x, torch.Tensor) and not isinstance(x, Handle)]
        self.grad, self.level = torch.is_grad_enabled(), private.level()
        operands = [*call.primals.values(), *[flat[place] for place in self.tensors]]
        moves = [self.grad and private.is_differentiated(x) for x in operands]  # type: ignore[arg-type]
        self.wanted = [i for i, own in enumerate(moves) if own]
        moving = {place for place, own in zip(self.tensors, moves[len(self.keys) :], strict=True) if own}
        self.forms: list[tuple[int, object]] = []
        for place, x in enumerate(flat):
            if isinstance(x, Handle):
                self.forms.append((_HANDLE, x.index))
            elif isinstance(x, torch.Tensor):
                self.forms.append((_TENSOR, (x.dtype, x.ndim, place in moving)))
            else:
                self.forms.append((_VALUE, x))

    def fits(self, traversal: Traversal, level: int, flat: Sequence[Any], spec: pytree.Spec) -> bool:
        """Tells whether a call has this form."""
        if level != self.level or torch.is_grad_enabled() != self.grad or spec != self.spec:
            return False
        for x, (kind, own) in zip(flat, self.forms, strict=True):
            if kind == _HANDLE:
                if type(x) is not Handle or x.index != own or x.owner is not traversal:
                    return False
            elif kind == _TENSOR:
                moves = type(x) in _PLAIN and x.requires_grad and self.grad and private.is_differentiated(x)
                if type(x) not in _PLAIN or (x.dtype, x.ndim, moves) != own:
                    return False
            elif x is not own and (type(x) is not type(own) or type(x) not in VALUES or x != own):
                return False
        return True


_HANDLE, _TENSOR, _VALUE = range(3)
# what runs parts of a function again in its pullback
_RERUN = frozenset("checkpoint checkpoint_sequential saved_tensors_hooks register_hook".split())


def note_route(
    call: Call,
    traversal: Traversal,
    number: int,
    remat: bool,
    memory: Memory,
    result: object,
    casts: torch.dtype | None,
) -> None:
    """Notes the form of a call that has run, if it was pure; of one that is recomputed once it was so then, too."""
    flat, spec = pytree.flatten((call.args, call.kwargs))
    reruns = remat and call.reach.names(_RERUN)  # a hook or a checkpoint may do something else in each run
    if reruns or level_here() is None or call.compiles or not is_pure(call, flat) or notes.get() is not None:
        return
    opaque = [x for x in pytree.flatten(result)[0] if not isinstance(x, (torch.Tensor, *VALUES))]
    if any(True for x in opaque for _ in tensors_in(x, lambda _: False)):
        return
    route = Route(call, flat, spec, remat, memory, {type(x) for x in opaque}, casts)

    def note() -> None:
        routes = traversal.schedule.record.routes.setdefault(number, [])
        routes[:] = [route, *routes[: ROUTES - 1]]

    if remat and route.wanted:
        call.confirmed = note
    else:
        traversal.schedule.pure += 1
        note()


def level_here() -> int | None:
    """The level of torch.func that is alone all that differentiates here, 0 where nothing does; None for more."""
    level = private.single_level()
    return level or (0 if not (private.transforms() or torch.is_grad_enabled()) else None)


def is_pure(call: Call, flat: Sequence[object]) -> bool:
    """Tells whether a call left nothing but what it put out, and was given its tensors in pytrees.

    Args:
        flat: the leaves of its arguments.
    """
    facts, reach, given = call.known, call.reach, {id(x) for x in flat}
    more = facts.mutated or facts.returned or facts.more or facts.read or facts.draws or facts.watched
    more = more or facts.whole or facts.kept
    more = more or any(not is_watch(mode) for mode in private.function_modes())  # another run is without
    dressed = any(vars(x).keys() - {OWNER} for x in reach.tensors)
    inside = not dressed and all(id(x) in given for x in (*reach.tensors, *reach.handles))
    return inside and not (more or call.left or reach.generators or reach.iterators)
