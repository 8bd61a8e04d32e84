"""What is known of tensors that vary between the ranks of a tensor axis, while a function runs.

What a map of `fz.parallel` or a module that is cut gives is noted. A note goes with a tensor into units and out of
them, and on to what is computed of it, until a map puts the whole together.
"""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from fzero.base import pytree
from fzero.base.context import variable
from fzero.capture.handle import READABLE, Function, Named, Operands
from fzero.comm.axis import Axis


class Cut(NamedTuple):
    """How a tensor is cut.

    Attributes:
        dim: from the end.
        parts: sizes along it of what is fused there (gate and up), of this rank's; None where they are not known.
        outer: how many of the rank's slices follow one another along it: of each example its heads, say.
    """

    dim: int
    parts: tuple[int, ...] | None = None
    outer: int = 1


class Mark(NamedTuple):
    """How a tensor varies.

    Attributes:
        source: the path of the module whose outputs are cut, or of the leaf, that it comes from; "" for each rank's
            own copy of what is the same on all.
        cut: along which dim; None where that is not known, of what has no elements or what maps gave.
    """

    source: str
    cut: Cut | None = None


class Notes:
    """Tensor -> how it varies over an axis, by identity; it keeps no tensor alive."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Mark]] = {}

    def note(self, tensor: torch.Tensor, mark: Mark) -> None:
        self._known[id(tensor)] = weakref.ref(tensor), mark

    def of(self, x: object) -> Mark | None:
        found = self._known.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def among(self, values: Sequence[object]) -> list[Mark]:
        """How those vary that are among some values, or in containers of them."""
        found = []
        for x in values:
            own = [self.of(x)] if isinstance(x, torch.Tensor) else []
            if isinstance(x, (tuple, list, dict)):
                own = map(self.of, pytree.leaves(x))
            found += [mark for mark in own if mark is not None]
        return found

    def forget(self, tensor: torch.Tensor) -> None:
        self._known.pop(id(tensor), None)

    def __bool__(self) -> bool:
        return bool(self._known)


# those of the function that is running, where its leaves are cut
notes: contextvars.ContextVar[Notes | None] = variable("notes", None)


def marks_of(known: Notes | None, tensors: Sequence[object]) -> list[Mark | None]:
    return [known.of(x) for x in tensors] if known else []


def hand_on(known: Notes | None, marks: Sequence[Mark | None], tensors: Sequence[torch.Tensor]) -> None:
    """Notes tensors as those vary that they stand for: `marks_of` these."""
    for mark, tensor in zip(marks, tensors, strict=False):
        if mark is not None and known is not None:
            known.note(tensor, mark)


class Following(TorchFunctionMode):
    """Inside, what is computed of tensors that vary is known to vary, on whichever dims."""

    def __init__(self, known: Notes) -> None:
        super().__init__()
        self._known = known

    def __torch_function__(self, func: Function, types: object, args: Operands = (), kwargs: Named = None) -> object:
        out = func(*args, **(kwargs or {}))
        if not self._known or func in READABLE:
            return out
        found = self._known.among((*args, *kwargs.values()) if kwargs else args)
        if found:
            mark = Mark(max(mark.source for mark in found))
            results = [out] if isinstance(out, torch.Tensor) else [*pytree.leaves(out), *args[: out is None]]
            for x in results:  # x[...] = y gives None
                if isinstance(x, torch.Tensor) and (self._known.of(x) is None or x is args[0]):
                    self._known.note(x, mark)
        return out
