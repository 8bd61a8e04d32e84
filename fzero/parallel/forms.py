"""What a varying value is to other ranks' values: the same (replicated), a piece along a dim, or a partial sum.

The rules by operation are those for modules (`rules`), which say what is sure to be right. What they do not say is in
doubt: before a first run it is compared by values (`first_run`). `check` has no values, and refuses what is not known
to be right of partial values: a piece or a replicated value added to one is added as often as ranks are, and a function
of it that is not linear gives no summand of what it gives of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.overrides import TorchFunctionMode

from fzero.base.places import Place
from fzero.comm.axis import Axis
from fzero.parallel import rules
from fzero.parallel.cuts import Mixed
from fzero.parallel.own_size import SHAPED, SIZES, own_sizes, own_sizes_in
from fzero.parallel.types import WHO, Axes, AxisTypeError, caller, is_users, need_silence, running, tensors_in, type_of
from fzero.table.handle import Function, Named, Operands, name_of, writes
from fzero.table.placements import Cut, Mark, notes, reads

REPLICATED, PARTIAL, CONSTANT = "replicated", "partial", "constant"
Form = int | str | None  # the dim of a piece, one of these words, or unknown
_FORMS = "_fzero_forms"  # of a tensor, as its type


def form_of(tensor: torch.Tensor, axis: str) -> Form:
    """What a tensor is on an axis to other ranks' ones; what does not vary is the same on all of them."""
    own = type_of(tensor)
    if axis not in own.varying and not own.constant:
        return REPLICATED
    forms, writes = vars(tensor).get(_FORMS, ({}, own.writes))
    return forms.get(axis, None if axis in own.varying else CONSTANT) if writes == own.writes else None


def _axes_of(tensor: torch.Tensor) -> Axes:
    """The axes on which a tensor varies, or is a constant as large as a slice, so that its sum does."""
    own = type_of(tensor)
    return own.varying if not own.constant else frozenset(vars(tensor).get(_FORMS, ({}, 0))[0])


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

    Args:
        where: the place that runs.
        ignored: axes on which nothing is checked.

    Attributes:
        reads: Python has learned something of a tensor's values.
    """

    def __init__(self, where: Callable[[], Place], ignored: Axes) -> None:
        super().__init__()
        self._where, self._ignored, self.reads = where, ignored, False

    def _doubt(self, func: Function | str, operands: Sequence[torch.Tensor]) -> None:
        """Notes that the caller's code does something that is not known, but where a module is looked at."""
        run, known = running.get(), notes.get()
        if run is None or not run.automatic or not is_users():
            return
        if caller() != "fzero.parallel.varying" or known is None or not any(map(known.of, operands)):
            run.doubt(func if isinstance(func, str) else name_of(func))

    def _sizes(self, func: Function, args: Operands, kwargs: Mapping[str, object], reader: str) -> object:
        """Sizes, of which those of a piece are the rank's own for the caller's code."""
        out, run = func(*args, **kwargs), running.get()
        x = args[0] if args else None
        looks = run is not None and run.automatic and not reader.startswith("fzero.")
        if not looks or not isinstance(x, torch.Tensor):
            return out
        for axis in type_of(x).varying - self._ignored:
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
        axes = frozenset[str]().union(*map(_axes_of, operands)) - self._ignored
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
            forms = {axis: form for axis, form in forms.items() if form != CONSTANT}
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
        if not any(form in (None, PARTIAL) or isinstance(form, int) for form in forms):
            return REPLICATED
        if rules.is_as_large(func) and PARTIAL in forms:
            return CONSTANT
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
        """Refuses what is not known to be right of partial values, where no values will tell."""
        run, partial = running.get(), [x for x, form in zip(operands, forms, strict=True) if form == PARTIAL]
        unknown = None in forms and rules.of_sums(func)  # which may be partial, too
        if run is None or run.automatic or run.pulls_back or run.doubts or not partial or unknown:
            return
        if torch.is_grad_enabled() and partial[0].requires_grad and any(x.requires_grad for x in tensors_in(out)):
            where = self._where()
            raise AxisTypeError(
                f"{WHO}: {where}: {name_of(func)} takes a value that is partial on axis {axis!r}, a summand on each "
                f"rank (of {type_of(partial[0]).source}), and gives no summand of what it gives of the sum, or is not "
                "known to: what else is added would be added once for each rank. A conversion is missing: "
                "fz.parallel.sum, or reduce_scatter, of the partial value comes first.",
                where,
            )


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

