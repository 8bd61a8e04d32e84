"""Which unit runs, and the leaves that it has."""

from __future__ import annotations

import contextvars
from collections.abc import Mapping

import torch

from fzero.engine.traversal import current

# (run, index) of the leaves that the unit that is running has; None outside of units
here: contextvars.ContextVar[Mapping[tuple[int, int], torch.Tensor] | None] = contextvars.ContextVar(
    "fzero_here", default=None
)


class inside:
    """Within a unit another one is a plain call; `leaves` are those that it has, None where all are full."""

    __slots__ = ("leaves", "tokens")

    def __init__(self, leaves: Mapping[tuple[int, int], torch.Tensor] | None) -> None:
        self.leaves = leaves

    def __enter__(self) -> None:
        self.tokens = current.set(None), here.set(self.leaves)

    def __exit__(self, *_: object) -> None:
        current.reset(self.tokens[0])
        here.reset(self.tokens[1])
