"""A dry run: maps that check types and send nothing, and what each of them would send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fzero.base import private
from fzero.base.places import Place
from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.parallel import maps
from fzero.parallel.forms import PARTIAL, REPLICATED, Form, form_of, set_forms
from fzero.parallel.types import (
    WHO,
    Axes,
    AxisTypeError,
    Conversion,
    DryRun,
    Run,
    Type,
    is_typed,
    is_users,
    set_type,
    type_of,
)
from fzero.parallel.watched import GATHER_OWN

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
            raise AxisTypeError(self._refusal(min(wrong_on), own), self.place)
        if not self.transposed and not all(self._fits(form_of(x, axis)) for axis in axes):
            self.run.doubt(f"fz.parallel.{self.name}")
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

    def _refusal(self, axis: str, own: Type) -> str:
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
            f"{got}is invariant (from {own.source}), which {why}. That is one conversion too many; or, where ranks "
            "compute different things with it, fz.parallel.copy or split is missing before it."
        )
