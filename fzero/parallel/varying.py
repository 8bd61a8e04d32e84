"""What varies between the ranks of a tensor axis in a module's first run: what a column gives, and what comes of it.

Such a value is each rank's slice along a dim of features or heads, or each rank's own copy. It goes with others: what
is the same on all ranks is made each rank's own where the two meet, so that cotangents are summed. What mixes the
elements along a dim that is cut is refused, and what is not known to leave it alone; a row or a gather puts the whole
together. Random numbers are each rank's own for slices, and the same otherwise.

A size that is read of a slice is the rank's own, good for shapes alone. What is known goes with tensors into units and
out again, on whatever way (`table/placements.py`). Later runs repeat what had to be done in the first one under a
signature (`watched.Acting`); mostly nothing, and then nothing looks at them, and units may be compiled. Not looked
at is what Python computes with a size by itself (`0.5 * h.shape[-1]`, `range`). What torch.func maps or differentiates
inside of a module must not be a slice.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fzero.base import hooks, private, pytree
from fzero.base.context import during
from fzero.base.pytree import leaves
from fzero.base.refusals import is_ours
from fzero.comm.axis import Axis
from fzero.parallel import rules
from fzero.parallel.cuts import Mixed
from fzero.parallel.own_size import SHAPED, SIZES, own_sizes, own_sizes_in
from fzero.parallel.randomness import own_stream
from fzero.parallel.types import running_mode
from fzero.table.handle import BOTH, READABLE, Function, Named, Operands, StandIn, name_of, named, writes
from fzero.table.placements import Action, Actions, Cut, Mark, Notes, Straight, notes, reads

Copy = Callable[[object, Axis], object]  # `piece.as_own`
# of the object, not of its values
_OF_THE_OBJECT = {
    *(getattr(torch.Tensor, name).__get__ for name in "grad_fn is_leaf _version grad".split()),
    *named("is_contiguous data_ptr storage_offset get_device retain_grad __repr__ __format__ is_inference", *BOTH),
    *named("is_signed is_conj is_neg is_pinned is_shared untyped_storage __hash__", torch.Tensor),
}
_DIFFERENTIATES = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}
_SAYS_DTYPE = {torch.Tensor.to, torch.Tensor.type_as}
_OF_OTHER_SIZES = named("new_zeros new_ones new_empty new_full", torch.Tensor)
_OURS = "fzero."  # whose own functions read sizes of slices as they are
_SINGLE = (torch.Tensor, int, float, complex, str, torch.dtype, torch.device, type(None))  # arguments of one leaf


class Varying(TorchFunctionMode):
    """Inside, what varies is known."""

    of_slices = True

    def __init__(self, known: Notes, copy: Copy) -> None:
        super().__init__()
        self.axis, self._copy, self.known = known.axis, copy, known
        self.note, self.mark_of, self._level = known.note, known.of, private.level()
        self._calls: dict[object, int] = {}
        self._done: dict[object, dict[int, Action]] = {}

    @property
    def actions(self) -> Actions:
        """What was done for slices."""
        return {func: (by_call, self._calls[func]) for func, by_call in self._done.items()}

    def called(self, what: object) -> None:
        self._calls[what] = self._calls.get(what, 0) + 1

    def did(self, what: object, places: Sequence[int] = (), draws: bool = False) -> None:
        """Notes what was done for slices where something was called last."""
        by_call = self._done.setdefault(what, {})
        number = self._calls[what]
        before = by_call.get(number, Action())
        by_call[number] = Action(before.places or tuple(places), before.draws or draws)

    def __torch_function__(self, func: Function, types: object, args: Operands = (), kwargs: Named = None) -> object:
        kwargs = dict(kwargs or {})
        if running_mode.get() is not self:  # a map sees to it
            return func(*args, **kwargs)
        if func == torch.Tensor.__iter__:
            return iter(self.__torch_function__(torch.Tensor.unbind, types, args))  # type: ignore[call-overload]
        if func in READABLE or func in SIZES:
            return self._read(func, args, kwargs, str(sys._getframe(1).f_globals.get("__name__")))
        return self._looked_at(func, func, args, kwargs)

    def _looked_at(self, func: Function, run: Function, args: Operands, kwargs: dict[str, object]) -> object:
        """What `run` gives, which does what a function does."""
        spec = None
        self.called(func)
        if reads(func, args):
            self.known.first.unsure = True
        if not self.known:
            return run(*args, **kwargs)
        flat: Sequence[object] = args
        if kwargs or not all(isinstance(x, _SINGLE) for x in args):
            flat, spec = pytree.flatten((args, kwargs))
        marks = [self.mark_of(x) for x in flat]
        if private.level() > self._level:
            self.need_level(flat, name_of(func))
        size = next(own_sizes_in(args, kwargs), None)
        if size is not None and (func not in SHAPED or not any(map(_can_be_shaped, flat, marks))):
            raise size.refusal(repr(name_of(func)))
        if not any(marks):
            return run(*args, **kwargs)
        if func in _DIFFERENTIATES:
            source = next((mark.source for mark in marks if mark and mark.source), "a copy")
            raise self.refused(func, Mark(source))
        into = writes(func, kwargs)
        if into:
            self._refuse_write(func, flat, marks)
        given, changed = args, kwargs
        if not all(marks):
            own = [x if mark else self._copy(x, self.axis) for x, mark in zip(flat, marks, strict=True)]
            given, changed = (tuple(own), {}) if spec is None else pytree.unflatten(spec, own)
            if places := [place for place, (x, y) in enumerate(zip(flat, own, strict=True)) if x is not y]:
                self.did(func, places)
        cut = [mark for mark in marks if mark and mark.source]
        out = self._ran(func, run, given, changed, cut)
        if func in _OF_OTHER_SIZES or (func in _SAYS_DTYPE and not marks[0]):  # as large as no slice, and of none
            return out
        mark = self._behind(func, args, kwargs, out, cut) if cut else Mark("")
        results = [*leaves(out), *given[:1]] if into else leaves(out)
        for x, own in zip(results, mark if isinstance(mark, list) else [mark] * len(results), strict=True):
            if isinstance(x, torch.Tensor):
                self.note(x, own)
        return out

    def _read(self, func: Function, args: Operands, kwargs: dict[str, object], reader: str) -> object:
        """What can be read of a tensor without its values."""
        out, mark = func(*args, **kwargs), self.mark_of(args[0]) if args else None
        if mark is None or mark.cut in (None, rules.PARTIAL) or func not in SIZES or reader.startswith(_OURS):
            return out
        return own_sizes(func, out, args, kwargs, mark, self.axis.name)

    def _ran(
        self, func: Function, run: Function, args: Operands, kwargs: dict[str, object], cut: Sequence[Mark]
    ) -> object:
        """What a function gives that is looked at as one."""
        if cut and func is F.scaled_dot_product_attention and kwargs.get("enable_gqa"):
            if any(isinstance(x, torch.Tensor) and x.ndim > 2 and not x.shape[-3] for x in leaves((args, kwargs))):
                raise self.refused(func, cut[0])  # torch 2.11 divides by how many heads of keys there are
        draws = bool(cut) and rules.draws(func, args, kwargs)
        if draws and hooks.in_checkpoint():
            raise ValueError(
                f"apply: {name_of(func)!r} draws random numbers for what module {cut[0].source!r} gives, whose "
                f"outputs are cut over axis {self.axis.name!r}, inside torch.utils.checkpoint, which would draw "
                "others when it runs again. Use fz.remat(step) instead, or move the random numbers out of it."
            )
        if draws:
            self.did(func, draws=True)
        with during(running_mode, None), own_stream(self.axis) if draws else contextlib.nullcontext():
            try:
                return run(*args, **kwargs)
            except (RuntimeError, IndexError) as error:
                if cut and not is_ours(error):
                    error.add_note(
                        f"fzero: {name_of(func)!r} is given this rank's slices of what {cut[0].source!r} gives, cut "
                        f"over axis {self.axis.name!r}: sizes along the dim that is cut are its own. In the plan of "
                        "fz.shard_tensor, say 'row' of the module that takes them in, and of a param that meets them "
                        "which dim is cut; or say 'column_gather' of the module that gives them."
                    )
                raise

    def _behind(
        self, func: Function, args: Operands, kwargs: dict[str, object], out: object, cut: Sequence[Mark]
    ) -> Mark | list[Mark]:
        """How varies what a function gives of slices, each of several where these differ; what mixes is refused."""
        unknown = [mark for mark in cut if mark.cut is None]
        if unknown or func in _OF_THE_OBJECT:
            return unknown[0] if unknown else cut[0]

        def cut_of(x: object) -> Cut | None:
            mark = self.mark_of(x)
            return mark.cut if mark else None

        try:
            if any(cut_of(x) and x.numel() == 0 for x in leaves((args, kwargs))):
                return Mark(cut[0].source)
            found = rules.cut_behind(func, args, kwargs, out, cut_of)
        except Mixed:
            raise self.refused(func, cut[0]) from None
        return [Mark(cut[0].source, each) for each in found] if isinstance(found, list) else Mark(cut[0].source, found)

    def refused(self, func: Function | str, cut: Mark) -> ValueError:
        what = func if isinstance(func, str) else repr(name_of(func))
        return ValueError(
            f"apply: {what} goes over the dim along which the outputs of module {cut.source!r} are cut over axis "
            f"{self.axis.name!r}, takes them apart, or is not known to leave that dim alone. Each rank has only its "
            "slice of them, and would get another result. Say 'column_gather' of that module in the plan of "
            "fz.shard_tensor, or leave it whole. If its weights are fused, say fz.parallel.cut('column', "
            "parts=...). A sum over that dim needs fz.parallel.sum before anything else is computed of it."
        )

    def attended(self, attend: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]) -> object:
        """What attention gives of q, k and v, which is looked at as one operation."""

        def run(*own: torch.Tensor) -> torch.Tensor:
            with unseen():
                return attend(*own)

        some = any(self.mark_of(x) for x in tensors)
        return self._looked_at(F.scaled_dot_product_attention, run if some else attend, tuple(tensors), {})

    def need_level(self, values: Sequence[object], what: str, path: str = "") -> None:
        """Refuses slices where a map or derivative of torch.func goes on that began within the module."""
        if private.level() <= self._level:
            return
        marks = [self.mark_of(private.unwrapped(x)) or self.mark_of(x) for x in values if isinstance(x, torch.Tensor)]
        source = path or next((mark.source for mark in marks if mark and mark.source), "")
        if source:
            raise self.refused(f"{what}, which torch.func maps or differentiates within a module,", Mark(source))

    def _refuse_write(self, func: Function, flat: Sequence[object], marks: Sequence[Mark | None]) -> None:
        first, slices = flat[0] if flat else None, next((mark.source for mark in marks if mark and mark.source), "")
        into_whole = isinstance(first, torch.Tensor) and marks[0] is None and (
            isinstance(first, StandIn) or first._is_view() or private.is_differentiated(first)
        )  # nothing would be known of it
        if into_whole or (slices and func == torch.Tensor.__setitem__):
            raise ValueError(
                f"apply: {name_of(func)!r} writes what module {slices!r} gives, whose outputs are cut over axis "
                f"{self.axis.name!r}, into a tensor by an index, or into one that all ranks have. Compute a new one: "
                "x = x + y, torch.where, torch.cat."
            )


def _can_be_shaped(x: object, mark: Mark | None) -> bool:
    """Tells whether something is a slice of which one knows how it lies, or of which no element can be another one."""
    return bool(mark and (mark.cut or (mark.source and isinstance(x, torch.Tensor) and x.numel() == 0)))


def unseen(known: Notes | None = None) -> contextlib.AbstractContextManager[object]:
    """Inside, nothing is looked at, nor noted, unless it is said in which notes."""
    if running_mode.get() is None and (isinstance(notes.get(), Straight) or notes.get() is known is None):
        return contextlib.nullcontext()
    return _unseen(known)


@contextlib.contextmanager
def _unseen(known: Notes | None) -> Iterator[None]:
    on_top = getattr(private.function_mode(), "of_slices", False)
    off = private.without_function_mode() if on_top else contextlib.nullcontext()
    with during(running_mode, None), during(notes, known), off:
        yield
