"""What a varying value is to other ranks' values: the same (replicated), a piece along a dim, or a partial sum.

The rules by operation are those for modules (`cut_behind`). What they do not know is unknown here, and nothing is said
of it. Of a partial value only sums are right: a piece or a replicated value added to it is added as often as ranks are,
and a function of it that is not linear gives no summand of what it gives of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fzero.base import pytree
from fzero.parallel import partial
from fzero.parallel.cut_dims import cut_behind, keeps_alike
from fzero.parallel.cut_shapes import Mixed
from fzero.table.handle import Function, Named, Operands
from fzero.table.placements import Cut

REPLICATED, PARTIAL, CONSTANT = "replicated", "partial", "constant"
Form = int | str | None  # the dim of a piece, one of these words, or unknown
FormOf = Callable[[torch.Tensor], Form]


class Clash(NamedTuple):
    """An operation that adds to a partial value what is not, or, where there is no other one, that is no sum of it."""

    partial: torch.Tensor
    other: torch.Tensor | None = None


class Forms(TorchFunctionMode):
    """Inside, what functions make of varying values has forms.

    Args:
        note: is told, of each function that makes tensors, what it made of which operands.
    """

    def __init__(self, note: Callable[[Function, Operands, Mapping[str, object], object], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Function, types: object, args: Operands = (), kwargs: Named = None) -> object:
        if func == torch.Tensor.__iter__:
            return iter(self.__torch_function__(torch.Tensor.unbind, types, args))  # type: ignore[call-overload]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, (torch.Tensor, tuple, list)):
            self._note(func, args, kwargs or {}, out)
        return out


def form_made(func: Function, args: Operands, kwargs: Mapping[str, object], form: FormOf, out: object) -> Form | Clash:
    """The form of what a function makes of operands of some forms; of all that it makes."""
    operands = [x for x in pytree.leaves((args, dict(kwargs))) if isinstance(x, torch.Tensor)]
    forms = [form(x) for x in operands]
    if None in forms or not forms:
        return None
    partials = [x for x, each in zip(operands, forms, strict=True) if each == PARTIAL]
    if not partials and not any(isinstance(each, int) for each in forms):
        return REPLICATED if {*forms} == {REPLICATED} and keeps_alike(func, args, dict(kwargs)) else None
    added = partial.given_bias(args, kwargs) if func is F.linear else None
    if isinstance(added, torch.Tensor) and form_made(func, args[:2], {}, form, out) == PARTIAL:
        own = form(added)
        return (
            Clash(operands[0], added)
            if own == REPLICATED or isinstance(own, int)
            else PARTIAL
            if own == PARTIAL
            else None
        )
    cut = {id(x): _cut(x, each) for x, each in zip(operands, forms, strict=True)}
    try:
        found = cut_behind(func, args, dict(kwargs), out, lambda x: cut.get(id(x)))
    except Mixed:
        return _clash(func, operands, forms, partials[0]) if partials else None
    if isinstance(found, list):
        return None
    if found == partial.PARTIAL:
        return PARTIAL
    first = out if isinstance(out, torch.Tensor) else out[0]  # type: ignore[index]
    return first.ndim + found.dim


def _cut(x: torch.Tensor, form: Form) -> Cut | None:
    if form == PARTIAL:
        return partial.PARTIAL
    return Cut(form - x.ndim) if isinstance(form, int) else None


def _clash(func: Function, operands: Sequence[torch.Tensor], forms: Sequence[Form], x: torch.Tensor) -> Form | Clash:
    """What is wrong where there is no rule for a partial value."""
    if func in partial.SUMS:
        others = [(y, each) for y, each in zip(operands, forms, strict=True) if each != PARTIAL and each != CONSTANT]
        return Clash(x, others[0][0]) if others else None
    if func in partial.SCALED:
        return Clash(x) if forms.count(PARTIAL) > 1 else None
    return Clash(x) if partial.bends(func) else None
