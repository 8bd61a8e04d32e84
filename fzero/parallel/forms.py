"""What a varying value is to other ranks' values: the same (replicated), a piece along a dim, or a partial sum.

And the maps of a dry run, which check types and forms, send nothing, and say what each of them would send.

The rules by operation are those for modules (`rules`), which say what is sure to be right. What they do not say is in
doubt: before a first run it is compared by values (`check_first_run`). `check` has no values, and refuses what is not
known to be right of partial values: a piece or a replicated value added to one is added as often as ranks are, and a
function of it that is not linear gives no summand of what it gives of the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.overrides import TorchFunctionMode

from fzero.base import private
from fzero.base.context import during
from fzero.base.places import Place
from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.comm.playing import playing
from fzero.parallel import rules
from fzero.parallel.cuts import Mixed
from fzero.parallel.own_size import SHAPED, SIZES, own_sizes, own_sizes_in
from fzero.parallel.types import (
    WHO,
    Axes,
    AxisTypeError,
    Conversion,
    DryRun,
    Type,
    caller,
    is_typed,
    is_users,
    need_silence,
    running,
    set_type,
    tensors_in,
    type_of,
)
from fzero.parallel.watched import GATHER_OWN
from fzero.table.handle import Function, Named, Operands, name_of, writes
from fzero.table.placements import Cut, Mark, notes, reads

REPLICATED, PARTIAL = "replicated", "partial"
Map = Callable[[torch.Tensor], torch.Tensor]
Form = int | str | None  # the dim of a piece, one of these words, or unknown
_FORMS = "_fzero_forms"  # of a tensor, as its type


def form_of(tensor: torch.Tensor, axis: str) -> Form:
    """What a tensor is on an axis to other ranks' ones; what does not vary is the same on all of them."""
    own = type_of(tensor)
    if axis not in own.varying and not own.constant:
        return REPLICATED
    forms, writes = vars(tensor).get(_FORMS, ({}, own.writes))
    return forms.get(axis, None if axis in own.varying else REPLICATED) if writes == own.writes else None


def _axes_of(tensor: torch.Tensor) -> Axes:
    """The axes on which a tensor varies, or is a constant as large as a slice, so that its sum does."""
    own = type_of(tensor)
    forms = vars(tensor).get(_FORMS, ({}, 0))[0] if own.constant else {}
    return own.varying | {axis for axis, form in forms.items() if form != REPLICATED}


def is_replicated(tensor: torch.Tensor, axis: str) -> bool:
    return form_of(tensor, axis) == REPLICATED


def set_forms(tensor: torch.Tensor, forms: Mapping[str, Form]) -> torch.Tensor:
    setattr(tensor, _FORMS, (forms, type_of(tensor).writes))
    return tensor


def need_cut(ax: Axis | None, who: str, dims: Mapping[torch.Tensor, int | None]) -> None:
    """Notes a function of `fz.parallel` of what is not known to be cut along these dims; None for any."""
    run = running.get()
    if run is None or ax is None:
        return
    for axis in run.checked(ax):
        if not all(isinstance(form := form_of(x, axis), int) and dim in (None, form) for x, dim in dims.items()):
            run.doubt(f"fz.parallel.{who}")


class Forms(TorchFunctionMode):
    """Inside, what functions make of varying values has forms.

    Attributes:
        reads: Python has learned something of a tensor's values.
    """

    def __init__(self, run: DryRun) -> None:
        super().__init__()
        self._run, self.reads = run, False

    def _doubt(self, func: Function, operands: Sequence[torch.Tensor]) -> None:
        """Notes that the caller's code does something that is not known, but where a module is looked at."""
        known = notes.get()
        if not self._run.automatic or not is_users():
            return
        if caller() != "fzero.parallel.varying" or known is None or not any(map(known.of, operands)):
            self._run.doubt(name_of(func))

    def _sizes(self, func: Function, args: Operands, kwargs: Mapping[str, object], reader: str) -> object:
        """Sizes, of which those of a piece are the rank's own for the caller's code."""
        out, x = func(*args, **kwargs), args[0] if args else None
        if not self._run.automatic or reader.startswith("fzero.") or not isinstance(x, torch.Tensor):
            return out
        for axis in type_of(x).varying - self._run.ignored:
            form = form_of(x, axis)
            if func == torch.Tensor.__len__ or form is None:
                self._doubt(func, [x])
            elif isinstance(form, int):
                return own_sizes(func, out, args, kwargs, Mark(str(type_of(x).source), Cut(form - x.ndim)), axis)
        return out

    def __torch_function__(self, func: Function, types: object, args: Operands = (), kwargs: Named = None) -> object:
        if func == torch.Tensor.__iter__:
            return iter(self.__torch_function__(torch.Tensor.unbind, types, args))  # type: ignore[call-overload]
        need_silence(func)
        self.reads = self.reads or reads(func, args)
        if func in SIZES:
            return self._sizes(func, args, kwargs or {}, caller())
        kwargs = kwargs or {}
        in_place = writes(func, kwargs) or name_of(func).startswith("__i")
        plain = _out_of_place(func, kwargs) if in_place else func
        operands = tensors_in((args, dict(kwargs)))
        axes = frozenset[str]().union(*map(_axes_of, operands)) - self._run.ignored
        if in_place and operands and axes - _axes_of(operands[0]):
            plain = None
        before = {axis: [form_of(x, axis) for x in operands] for axis in axes}
        out = func(*args, **kwargs)
        made = tensors_in(out) if isinstance(out, (torch.Tensor, tuple, list)) else ()
        if func not in SHAPED and next(own_sizes_in(args, kwargs), None) is not None:
            self._doubt(func, operands)
        if axes and plain is None:
            self._doubt(func, operands)
        elif axes and made and plain is not None:
            forms = {axis: self._made(plain, args, kwargs, operands, own, axis, out) for axis, own in before.items()}
            alike = [axis for x in made if not type_of(x).constant for axis in forms if axis not in type_of(x).varying]
            if any(forms[axis] != REPLICATED for axis in alike):  # but a slice's size is in it
                self._doubt(func, operands)
            for tensor in made:
                if in_place or not any(tensor is x for x in operands):
                    set_forms(tensor, forms)
        return out

    def _made(
        self,
        func: Function,
        args: Operands,
        kwargs: Mapping[str, object],
        operands: Sequence[torch.Tensor],
        forms: list[Form],
        axis: str,
        out: object,
    ) -> Form:
        """The form on an axis of what a function makes of operands, of these forms; of all that it makes."""
        if {*forms} == {REPLICATED} or (func in rules.AS_LARGE and PARTIAL in forms):
            return REPLICATED
        cuts = {id(x): _cut(x, form) for x, form in zip(operands, forms, strict=True)}
        try:
            if None in forms:
                raise Mixed
            found = rules.cut_behind(func, args, dict(kwargs), out, lambda x: cuts.get(id(x)))
        except Mixed:
            self._refuse_partial(func, operands, forms, axis, out)
            self._doubt(func, operands)
            return None
        if isinstance(found, list) or found.outer > 1:
            return None
        return PARTIAL if found == rules.PARTIAL else tensors_in(out)[0].ndim + found.dim

    def _refuse_partial(
        self, func: Function, operands: Sequence[torch.Tensor], forms: Sequence[Form], axis: str, out: object
    ) -> None:
        """Refuses what is not known to be right of partial values, at once where no values will tell."""
        run, partial = self._run, [x for x, form in zip(operands, forms, strict=True) if form == PARTIAL]
        unknown = None in forms and func in rules.RULES and rules.RULES[func].sums  # which may be partial, too
        if run.pulls_back or (run.doubts and not run.automatic) or not partial or unknown:
            return
        if torch.is_grad_enabled() and partial[0].requires_grad and any(x.requires_grad for x in tensors_in(out)):
            where = run.where()
            error = AxisTypeError(
                f"{WHO}: {where}: {name_of(func)} takes a value that is partial on axis {axis!r}, a summand on each "
                f"rank (of {type_of(partial[0]).source}), and gives no summand of what it gives of the sum, or is not "
                "known to: what else is added would be added once for each rank. A conversion is missing: "
                "fz.parallel.sum, or reduce_scatter, of the partial value comes first.",
                where,
            )
            if not run.automatic:
                raise error
            run.unlikely.append(error)


def _out_of_place(func: Function, kwargs: Mapping[str, object]) -> Function | None:
    """What a function computes that writes it to its first argument; None where that is not known."""
    name = name_of(func)
    if not name.endswith("_"):
        return func if kwargs.get("out") is None else None
    name = name.removeprefix("__i").rstrip("_")
    return getattr(torch.Tensor, name, None) or getattr(torch.Tensor, f"__{name}__", None)


def _cut(x: torch.Tensor, form: Form) -> Cut | None:
    if form == PARTIAL:
        return rules.PARTIAL
    return Cut(form - x.ndim) if isinstance(form, int) else None


# ---- maps

INVARIANT, VARYING = "invariant", "varying"
# what a map takes and gives; its transpose takes what it gives
KINDS = {
    "copy": (INVARIANT, VARYING),
    "sum": (VARYING, INVARIANT),
    "gather": (VARYING, INVARIANT),
    "split": (INVARIANT, VARYING),
    GATHER_OWN: (VARYING, VARYING),
    **dict.fromkeys(("reduce_scatter", "all_to_all", "ring_shift"), (VARYING, VARYING)),
}
# what it does to equal values
_ADDING = {"sum": "added up", "reduce_scatter": "added up", "gather": "joined", GATHER_OWN: "joined"}


class _Wire:
    """Stands for the other ranks, of which each has what this one has: takes what is sent to them, and counts it."""

    def __init__(self, rank: int) -> None:
        self._rank, self.messages, self.sent = rank, 0, 0

    def size(self, _: str, own: int) -> int:
        return own

    def rank(self, _: str, own: int) -> int:
        return own

    def exchange(self, axis: str, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor], tag: object) -> None:
        self.messages += 1
        self.sent += sum([x.nbytes for rank, x in enumerate(send) if rank != self._rank])
        own, largest = send[self._rank], max(send, key=torch.Tensor.numel).reshape(-1)
        for target in receive if largest.numel() and not private.is_fake(largest) else ():
            places = torch.arange(target.numel(), device=own.device) % largest.numel()
            target.copy_((own if own.numel() == target.numel() else largest[places]).view(target.shape))


def typed(
    run: DryRun, name: str, ax: Axis, there: Map, back: Map, dims: Sequence[int], sizes: Sequence[int] | None
) -> tuple[Map, Map]:
    """A map along dims, into pieces of sizes, and its transpose, that check types and send nothing."""
    if run.checked(ax) == {ax.name}:
        run.axes[ax.name] = ax.size
    told, run.told = run.told, []
    call = functools.partial(_Called, run, name, ax, run.where(), dims, sizes)
    return call(there, False, told), call(back, True, [])


@dataclass(eq=False)
class _Called:
    """A map as one line calls it, or its transpose: checks what it is given, and sends nothing."""

    run: DryRun
    name: str
    ax: Axis
    place: Place
    dims: Sequence[int]
    sizes: Sequence[int] | None
    send: Map
    transposed: bool
    told: list[int]

    def __post_init__(self) -> None:
        self.takes, self.gives = reversed(KINDS[self.name]) if self.transposed else KINDS[self.name]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        own, axes = type_of(x), self.run.checked(self.ax)
        if self.run.automatic and not is_typed(x) and x.grad_fn is not None:
            raise NotImplementedError("a tensor that was computed where types are not known")
        wrong_on = axes & own.varying if self.takes == INVARIANT else axes - own.varying
        if wrong_on and not own.constant:
            raise AxisTypeError(self._refusal(min(wrong_on), own, "invariant"), self.place)
        if not self.transposed and not all(self._fits(form_of(x, axis)) for axis in axes):
            self.run.doubt(f"fz.parallel.{self.name}")
            if self.name in _ADDING and REPLICATED in [form_of(x, axis) for axis in axes]:
                self.run.unlikely.append(AxisTypeError(self._refusal(min(axes), own, "replicated"), self.place))
        if self.sizes is not None:
            self.run.note_sizes(self.ax, self.sizes)
        wire = _Wire(self.ax.rank)
        with torch.no_grad(), private.under_function_modes(()), during(playing, wire), during(pieces.graph, None):  # type: ignore[arg-type]
            out = self.send(x)
            if self.name == ("copy" if self.transposed else "sum"):
                out = x * self.ax.size  # of a large one ranks send each other sums that this one does not have
            out = out.clone() if out is x or out._is_view() else out  # which may be written to
        told, self.told = self.told if self.ax.size > 1 else [], []
        met = Conversion(
            *(self.name, self.ax.name, self.place, tuple(x.shape), self.transposed),
            *(wire.messages + len(told), wire.sent + sum(told) * (self.ax.size - 1)),
        )
        self.run.conversions.append(met)
        varying = own.varying | axes if self.gives == VARYING else own.varying - axes
        leaf = own.leaf if varying else ""
        return set_forms(set_type(out, Type(varying, False, self.place, leaf)), self._forms(x, axes))

    def _fits(self, form: Form) -> bool:
        """Tells whether it does to the ranks' values what one process does to the whole."""
        if self.takes == INVARIANT or (form is None and not is_users()):
            return True
        if self.name in ("sum", "reduce_scatter"):
            return form == PARTIAL
        return self.name != "ring_shift" and form == self.dims[-1]

    def _forms(self, x: torch.Tensor, axes: Axes) -> dict[str, Form]:
        """What the result is on each axis, as far as it is known."""
        forms = {axis: form_of(x, axis) for axis in type_of(x).varying}
        moved = self.dims
        for axis, form in forms.items():
            if axis in axes or form in moved:
                forms[axis] = None
        for axis in axes if self.gives == VARYING and not self.transposed else ():
            if self.name in ("copy", GATHER_OWN):
                forms[axis] = REPLICATED
            elif self.name in ("split", "reduce_scatter") and len(axes) == 1:
                forms[axis] = moved[0]
            elif self.name == "all_to_all" and form_of(x, axis) == moved[1]:
                forms[axis] = moved[0]
            elif self.name == "ring_shift" and form_of(x, axis) != REPLICATED:
                forms[axis] = form_of(x, axis)
        return forms

    def _refusal(self, axis: str, own: Type, found: str) -> str:
        verb = f"fz.parallel.{self.name}"
        if self.transposed:
            return (
                f"{WHO}: {self.place}: the cotangent of what {verb} gives has another type than that on axis {axis!r} "
                f"(from {own.source}): {self.takes} was expected."
            )
        got = f"{WHO}: {self.place}: {verb} takes a value that is {self.takes} on axis {axis!r}, and gets one that "
        if self.takes == INVARIANT:
            return (
                f"{got}varies there (from {own.source}). That is one conversion too many; or, where it is a summand or "
                "a piece of a whole value, fz.parallel.sum or gather is missing before it."
            )
        what = _ADDING.get(self.name)
        why = f"would be {what} as often as there are ranks" if what else "is the same on all ranks"
        return (
            f"{got}is {found} (from {own.source}), which {why}. That is one conversion too many; or, where ranks "
            "compute different things with it, fz.parallel.copy or split is missing before it."
        )
