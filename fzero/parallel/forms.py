"""What a varying value is to other ranks' values: the same (replicated), a piece along a dim, or a partial sum.

And the maps of a dry run, which check types and forms, send nothing, and say what each of them would send.

The rules by operation are those for modules (`rules`), which say what is sure to be right. What they do not say is in
doubt: before a first run it is compared by values (`first_run`). `check` has no values, and refuses what is not known
to be right of partial values: a piece or a replicated value added to one is added as often as ranks are, and a function
of it that is not linear gives no summand of what it gives of the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fzero.base import private
from fzero.base.places import Place
from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.parallel import maps, rules
from fzero.parallel.cuts import Mixed
from fzero.parallel.own_size import SHAPED, SIZES, own_sizes, own_sizes_in
from fzero.parallel.types import (
    WHO,
    Axes,
    AxisTypeError,
    Conversion,
    DryRun,
    Run,
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
        in_place = _in_place(func, kwargs)
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
        if {*forms} == {REPLICATED} or (rules.is_as_large(func) and PARTIAL in forms):
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
        unknown = None in forms and rules.of_sums(func)  # which may be partial, too
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


def _in_place(func: Function, kwargs: Named) -> bool:
    return writes(func, kwargs) or name_of(func).startswith("__i")


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


class _Part:
    """What a map sends, taken apart."""

    def __init__(self, send: Run) -> None:
        self._send, self._function = send, getattr(send, "func", send)
        self._args: tuple[Any, ...] = getattr(send, "args", ())
        self._cuts = self._function in (maps._cut, maps._joined, maps._scattered)

    @property
    def sizes(self) -> Sequence[int] | None:
        """Those of the pieces that it cuts or joins."""
        return self._args[2] if self._cuts else None

    @property
    def dims(self) -> Sequence[int]:
        """The dims that it cuts or joins along."""
        if self._function is maps._exchanged:
            return self._args[1:3]
        return self._args[1:2] if self._cuts or self._function is maps._padded else ()

    def run(self, ax: Axis, x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
        """What it makes if all ranks have what this one has, the exchanges, and the bytes that this rank sends."""
        others, whole, args = ax.size - 1, x.numel() * x.element_size(), self._args
        match self._function:
            case maps._total:
                own = pieces.balanced(x.numel(), ax.size)[ax.rank] * x.element_size()
                in_pieces = ax.size > 2 and x.numel() >= pieces.SMALL
                messages, sent = (2, whole - own + others * own) if in_pieces else (1, others * whole)
                out = x * ax.size
            case maps._joined:
                out, messages, sent = _stretched(x, args[1], pieces.starts(args[2])[-1]), 1, others * whole
            case maps._scattered:
                own = maps._cut(ax, args[1], args[2], x)
                out, messages, sent = own * ax.size, 1, whole - own.numel() * own.element_size()
            case maps._exchanged:
                own = maps._cut(ax, args[1], args[3], x)
                out = _stretched(own, args[2], pieces.starts(args[4])[-1])
                messages, sent = 1, whole - own.numel() * own.element_size()
            case maps._shifted:
                out, messages, sent = x.clone(), 1, whole if args[1] % ax.size else 0
            case _:
                out, messages, sent = self._send(x).clone(), 0, 0
        return (out, messages, sent) if others else (out, 0, 0)


def _stretched(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """A tensor over and over along a dim."""
    if not x.shape[dim]:
        return x.new_zeros((*x.shape[:dim], size, *x.shape[dim + 1 :]))
    return x.index_select(dim, torch.arange(size, device=x.device) % x.shape[dim])


class Called:
    """A map as one line calls it, or its transpose: checks what it is given, and sends nothing."""

    def __init__(
        self, run: DryRun, name: str, ax: Axis, place: Place, send: Run, transposed: bool, told: list[int]
    ) -> None:
        self.run, self.name, self.ax, self.place, self.part = run, name, ax, place, _Part(send)
        self.transposed, self.told = transposed, told
        self.takes, self.gives = reversed(KINDS[name]) if transposed else KINDS[name]

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
        if self.part.sizes is not None:
            self.run.note_sizes(self.ax, self.part.sizes)
        with torch.no_grad(), private.under_function_modes(()):
            out, messages, sent = self.part.run(self.ax, x)
        told, self.told = self.told if self.ax.size > 1 else [], []
        met = Conversion(
            *(self.name, self.ax.name, self.place, tuple(x.shape), self.transposed),
            *(messages + len(told), sent + sum(told) * (self.ax.size - 1)),
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
        return self.name != "ring_shift" and form == self.part.dims[-1]

    def _forms(self, x: torch.Tensor, axes: Axes) -> dict[str, Form]:
        """What the result is on each axis, as far as it is known."""
        forms = {axis: form_of(x, axis) for axis in type_of(x).varying}
        moved = self.part.dims
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
