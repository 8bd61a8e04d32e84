"""A module that is cut: its first run is looked at operation by operation, later ones do what that one has shown.

And what others ask while it runs: how a tensor varies, and may a map of `fz.parallel` take it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fzero.base import private, pytree
from fzero.base.context import during
from fzero.comm.axis import Axis
from fzero.engine.alike import need_invariant
from fzero.parallel.randomness import own_stream
from fzero.parallel.rules import PARTIAL
from fzero.parallel.types import running, running_mode
from fzero.parallel.varying import Copy, Varying, unseen
from fzero.table.handle import Function, Named, Operands, name_of
from fzero.table.placements import Action, Actions, Cut, Mark, Notes, Straight, notes, noting

MAP = "a map"  # the source of what a map gives, called by a module or a function itself
GATHER_OWN = "gather(own=True)"  # the name of that map
_WHOLE, _CUTTING = ("sum", "gather"), ("split", "reduce_scatter")  # the maps that give what is whole, and pieces


class Acting(TorchFunctionMode):
    """Inside, what a module's first run needed is done again, and nothing is looked at.

    What is whole and meets slices is made each rank's own, and each rank draws random numbers for its slices by itself.
    It goes by the number of a function's call in the module. A module that needs nothing runs as it is.
    """

    of_slices = True

    def __init__(self, axis: Axis, copy: Copy, actions: Actions) -> None:
        super().__init__()
        self.axis, self._copy, self._actions = axis, copy, actions
        self._calls = dict.fromkeys(actions, 0)

    def next(self, what: object) -> Action:
        """What is to be done where something is called."""
        if what not in self._actions:
            return Action()
        self._calls[what] += 1
        return self._actions[what][0].get(self._calls[what], Action())

    def owned(self, values: Sequence[object], action: Action) -> list[object]:
        return [self._copy(x, self.axis) if i in action.places else x for i, x in enumerate(values)]

    def need_all(self) -> None:
        """Refuses a run that called other functions than the first one."""
        for what, (_, count) in self._actions.items():
            if self._calls[what] != count:
                name = what if isinstance(what, str) else name_of(what)
                raise ValueError(
                    f"apply: a module calls {name!r} {self._calls[what]} times, and called it {count} times in its "
                    "first run with such inputs, which showed where values that all ranks of axis "
                    f"{self.axis.name!r} have meet slices. Let what it does depend on its inputs alone; or on a "
                    "tensor's value that it reads (.item(), bool(x)), as each run is looked at then."
                )

    def __torch_function__(self, func: Function, types: object, args: Operands = (), kwargs: Named = None) -> object:
        if running_mode.get() is not self or (func not in self._actions and func != torch.Tensor.__iter__):
            return func(*args, **(kwargs or {}))
        if func == torch.Tensor.__iter__:
            return iter(self.__torch_function__(torch.Tensor.unbind, types, args))  # type: ignore[call-overload]
        action = self.next(func)
        if action.places:
            flat, spec = pytree.flatten((args, dict(kwargs or {})))
            args, kwargs = pytree.unflatten(spec, self.owned(flat, action))
        with during(running_mode, None), own_stream(self.axis) if action.draws else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))


def watcher() -> Varying | None:
    """What looks at the module that is running, in its first run."""
    mode = running_mode.get()
    return mode if isinstance(mode, Varying) else None


def watching(
    run: Function, axis: Axis, copy: Copy, module: tuple[object, str], code: Function | None = None
) -> Function:
    """`run`, a function of a module or of one of its units, in which what varies is known.

    Args:
        copy: `piece.as_own`.
        module: what it is known by in later runs, and the path of the unit; "" of the whole module.
        code: what runs then in its place, where it needs nothing.
    """

    @functools.wraps(run)
    def call(*args: object, **kwargs: object) -> object:
        known = notes.get()
        if isinstance(known, Straight) and known.axis == axis:
            actions = known.first.of(module, (args, kwargs))
            if not actions and running_mode.get() is None:
                return (code or run)(*args, **kwargs)
            mode: Acting | Varying = Acting(axis, copy, actions)
            with during(running_mode, mode), mode:
                out = run(*args, **kwargs)
            mode.need_all()
            return out
        if known is None or known.axis != axis:
            known = Notes(axis)
        mode = Varying(known, copy)
        with during(running_mode, mode), during(notes, known), mode:
            out = run(*args, **kwargs)
        if known.first.blind and not module[1]:
            need_invariant(out, known)
        known.first.note(module, (args, kwargs), mode.actions)
        return out

    return call


def note_leaves(numbers: Sequence[int]) -> None:
    """Notes the leaves of the running step that a module is given, as `origins_of` tells them."""
    known = noting()
    if known is not None:
        known.of_modules.update([abs(number) - 1 for number in numbers if number])


def around(call: Callable[..., object], *given: object) -> object:
    """A unit's call, which is watched by itself: what the engine does around it is not looked at."""
    with unseen(notes.get()):
        return call(*given)


def mark_of(x: object) -> Mark | None:
    """How a tensor varies, where that is known."""
    mode = watcher()
    return None if mode is None else mode.mark_of(x)


def need_level(path: str) -> None:
    """Refuses a module whose leaves are cut within a map or derivative of torch.func that began in a module."""
    mode = watcher()
    if mode is not None:
        mode.need_level((), "its forward", path)


def attended(attend: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`attend(q, k, v)` of [b, heads, t, d], which is looked at as one operation."""
    mode = running_mode.get()
    if isinstance(mode, Acting):
        own = mode.owned(tensors, mode.next(F.scaled_dot_product_attention))
        with unseen():
            return attend(*own)
    out = mode.attended(attend, tensors) if isinstance(mode, Varying) else attend(*tensors)
    assert isinstance(out, torch.Tensor)
    return out


def need_whole(func: Callable[..., object], *values: object) -> None:
    """Refuses slices where nothing is known of what a function does with them."""
    mode = watcher()
    for x in pytree.flatten(values)[0] if mode is not None else ():
        if mode is not None and (mark := mode.mark_of(x)) is not None and mark.source:
            raise mode.refused(func, mark)


def note(x: torch.Tensor, mark: Mark) -> torch.Tensor:
    mode = watcher()
    if mode is not None:
        mode.note(x, mark)
    return x


def taken(module: str, marks: Sequence[Mark]) -> Mark | None:
    """How what a module is given varies: of the first that does, or as it did in the first run."""
    mode = running_mode.get()
    if isinstance(mode, Acting):
        return Mark("") if mode.next(module).places else None
    if isinstance(mode, Varying):
        mode.called(module)
        if marks and not marks[0].source:
            mode.did(module, [0])
    return marks[0] if marks else None


# ---- maps of `fz.parallel`: what they take, and how their results vary


def _covers(ax: Axis, tensor: Axis) -> bool:
    """Tells whether a map's axis is the tensor axis, or several that are one with it."""
    return set(tensor.members) <= set(ax.members)


def mapped(
    name: str, ax: Axis, x: torch.Tensor, out: torch.Tensor, dims: Sequence[int], sizes: Sequence[int] | None
) -> torch.Tensor:
    """Notes what a map of `fz.parallel` gave that cuts or joins along these dims, into pieces of these sizes."""
    known = noting()
    if known is None:
        return out
    after = known.of(x)
    if _covers(ax, known.axis):
        cut = None
        if name in _CUTTING and sizes is not None and ax.members == known.axis.members:
            cut = Cut(dims[0] - x.ndim, (tuple(sizes),), ax.rank)
        after = None if name in _WHOLE else Mark("" if name in ("copy", GATHER_OWN) else MAP, cut)
    known.forget(out) if after is None else known.note(out, after)
    return out


def note_copy(name: str, ax: Axis) -> None:
    """Notes that a user's function copies what ranks have alike, outside of modules."""
    known = noting()
    if known is not None and watcher() is None and _covers(ax, known.axis):
        known.copies = name


def need_mappable(name: str, ax: Axis, x: torch.Tensor, dims: Sequence[int]) -> None:
    """Refuses a map, along these dims, of what varies, or is cut, otherwise than the map takes it."""
    known, mode = noting(), watcher()
    if running.get() is not None and mode is None:
        return  # its types say it, and the line
    mark = None if known is None else known.of(x)
    if known is None or mark is None or not _covers(ax, known.axis):
        return
    if name in ("copy", "split") and private.is_differentiated(x):
        raise ValueError(
            f"parallel.{name}: got a tensor of shape {tuple(x.shape)} that varies between the ranks of axis "
            f"{ax.name!r} already ({f'it comes of {mark.source!r}' if mark.source else 'it is a copy'}), expected one "
            "that is the same on all, as its cotangents are put together. Leave the map out, or put the ranks' tensors "
            "together first (fz.parallel.sum, gather)."
        )
    if mode is not None and mark.cut is not None:
        summed = name in ("sum", "reduce_scatter")  # slices are no parts of a sum
        elsewhere = name in ("gather", GATHER_OWN) and dims[0] - x.ndim != mark.cut.dim
        if (mark.cut == PARTIAL) != summed or elsewhere:
            raise mode.refused(f"fz.parallel.{name}", mark)
