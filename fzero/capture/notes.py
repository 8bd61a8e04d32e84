"""What is known of tensors beside their values, while a function runs: it goes with them into units and out again."""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Sequence

import torch

from fzero.base.context import variable


class Notes:
    """Tensor -> what is known of it, by identity; it keeps no tensor alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], object]] = {}

    def note(self, tensor: torch.Tensor, what: object) -> None:
        self._known[id(tensor)] = weakref.ref(tensor), what

    def of(self, x: object) -> object:
        found = self._known.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def forget(self, tensor: torch.Tensor) -> None:
        self._known.pop(id(tensor), None)

    def __bool__(self) -> bool:
        return bool(self._known)

    def of_each(self, tensors: Sequence[object]) -> list[object]:
        return [self.of(x) for x in tensors] if self else []

    def hand_on(self, each: Sequence[object], tensors: Sequence[torch.Tensor]) -> None:
        """Notes of tensors what was known of those that they stand for: `of_each` of these."""
        for what, tensor in zip(each, tensors, strict=False):
            if what is not None:
                self.note(tensor, what)


# those of the function that is running, where somebody asks
notes: contextvars.ContextVar[Notes | None] = variable("notes", None)


def known() -> Notes:
    """What is known here; nothing yet, where nobody asks."""
    own = notes.get()
    return Notes() if own is None else own
