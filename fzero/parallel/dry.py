"""A dry run: maps that check types and send nothing, and what each of them would send."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

import torch

from fzero.base import private
from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.parallel import maps
from fzero.parallel.axis import is_averaged
from fzero.parallel.forms import PARTIAL, REPLICATED, Form, form_of, set_forms
from fzero.parallel.types import (
    WHO,
    Axes,
    AxisTypeError,
    Place,
    Run,
    Type,
    is_typed,
    is_users,
    place,
    set_type,
    type_of,
)
from fzero.parallel.watched import GATHER_OWN

TOLD = 8 * (1 + maps.MOST_DIMS)  # bytes of the sizes that ranks tell each other
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


class Conversion(NamedTuple):
    """A map of `fz.parallel` that `fz.parallel.check` has met.

    Attributes:
        name: of the map, such as "sum".
        axis: that it communicates over.
        place: the line that calls it.
        shape: of this rank's input.
        transposed: True in a pullback of that line.
        messages: exchanges with the other ranks of the axis.
        sent: bytes that this rank sends.
    """

    name: str
    axis: str
    place: Place
    shape: tuple[int, ...]
    transposed: bool
    messages: int
    sent: int


class DryRun:
    """One dry run: where it is, and what it has met.

    Args:
        ignored: axes on which nothing is checked.
        over: the only one that is checked, also as a part of other ones; None for all.

    Attributes:
        guessed: it has asked for sizes of other ranks, which nobody tells.
        doubts: what the caller's code does that types do not know, and where.
    """

    def __init__(self, ignored: Axes, until: CodeType, over: Axis | None = None) -> None:
        self.guessed = False
        self.ignored, self.pulls_back, self._until, self._over = ignored, False, until, over
        self.automatic = over is not None
        self.doubts: list[tuple[Place, str]] = []
        self.conversions: list[Conversion] = []
        self.axes: dict[str, int] = {}  # single ones that maps go over and that no mean is taken over, and their sizes
        self._sizes: dict[tuple[str, int], list[int]] = {}
        self._told: list[int] = []  # bytes that ranks tell each other, of which the next conversion is said to be

    def where(self) -> Place:
        return Place("", 0, "the pullback") if self.pulls_back else place(self._until)

    def typed(self, name: str, ax: Axis, there: Run, back: Run) -> tuple[Run, Run]:
        """A map and its transpose that check types and send nothing."""
        takes, gives = KINDS[name]
        if self.checked(ax) == {ax.name}:
            self.axes[ax.name] = ax.size
        told, self._told = self._told, []
        call = functools.partial(_Call, self, name, ax, self.where())
        return call(_Part(there), takes, gives, False, told), call(_Part(back), gives, takes, True, [])

    def need_cut(self, ax: Axis, who: str, dims: Mapping[torch.Tensor, int | None]) -> None:
        """Notes a function of `fz.parallel` of what is not known to be cut along these dims; None for any."""
        for axis in self.checked(ax):
            if not all(isinstance(form := form_of(x, axis), int) and dim in (None, form) for x, dim in dims.items()):
                self.doubt(f"fz.parallel.{who}")

    def doubt(self, what: str) -> None:
        self.doubts.append((self.where(), what))

    def exchange(self, axis: str, *_: object) -> None:
        raise NotImplementedError(f"ranks of axis {axis!r} would communicate")

    def size(self, _: str, own: int) -> int:
        return own

    def rank(self, _: str, own: int) -> int:
        """A rank's number, by which the caller's code may compute what no tensor shows."""
        if is_users():
            self.doubt("ax.rank")
        return own

    def sizes(self, ax: Axis, own: int) -> list[int]:
        """The sizes of a dim on all ranks: as something of this size was cut before, or else the same on all."""
        self._told.append(TOLD)
        self.guessed = True
        return self._sizes.get((ax.name, own), [own] * ax.size)

    def note_sizes(self, ax: Axis, sizes: Sequence[int]) -> None:
        self._sizes[ax.name, sizes[ax.rank]] = list(sizes)

    def checked(self, ax: Axis) -> Axes:
        """The mesh axes of an axis on which types are checked."""
        if self._over is not None:
            return frozenset((self._over.name,)) if {*self._over.members} <= {*ax.members} else frozenset()
        return frozenset() if is_averaged(ax) else frozenset(ax.name.split(", ")) - self.ignored


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


@dataclass(eq=False, slots=True)
class _Call:
    """A map as one line calls it, or its transpose: checks what it is given, and sends nothing."""

    run: DryRun
    name: str
    ax: Axis
    place: Place
    part: _Part
    takes: str
    gives: str
    transposed: bool
    told: list[int]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        own, axes = type_of(x), self.run.checked(self.ax)
        if self.run.automatic and not is_typed(x) and x.grad_fn is not None:
            raise NotImplementedError("a tensor that was computed where types are not known")
        wrong_on = axes & own.varying if self.takes == INVARIANT else axes - own.varying
        if wrong_on and not own.constant:
            raise AxisTypeError(self._refusal(min(wrong_on), own, "invariant"), self.place)
        if self.name in _ADDING and not self.transposed:
            for axis in sorted(axes):
                if form_of(x, axis) == REPLICATED:
                    raise AxisTypeError(self._refusal(axis, own, "replicated, the same on all ranks"), self.place)
        for axis in () if self.transposed else axes:
            if not self._fits(form_of(x, axis)):
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
