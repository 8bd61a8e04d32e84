"""What graphs of steps and of functions keep: a program for each signature."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from fzero.base import private
from fzero.base.context import in_differentiated
from fzero.comm import backend

P = TypeVar("P")
MANY, KEPT = 10, 64  # traces that are said; programs that are kept


def place() -> object:
    """This rank, where there are others: its messages, and first runs, are its own."""
    return weakref.ref(world) if (world := backend.world()) is not None else None


class Programs(Generic[P]):
    """Programs by signatures.

    Attributes:
        traces: how many signatures were traced.
    """

    def __init__(self, backend: str, static: Collection[int], fallback: bool) -> None:
        self.backend, self.static, self.fallback = backend, tuple(static), fallback
        self.traces = 0
        self._plain = False  # after a trace that failed, where that may be
        self._programs: dict[object, P] = {}
        self._heard: dict[object, list[tuple[int, ...]]] = {}  # what ranks told each other in runs without a graph

    def or_plain(self, name: str, make: Callable[[], P], ranks: bool = False) -> P | None:
        """What `make` traces; None where it cannot be traced, and need not.

        Args:
            ranks: whether others run their graphs, so that it must.
        """
        try:
            return make()
        except Exception as error:
            if not self.fallback or ranks:
                raise
            self._plain = True
            warnings.warn(f"jit: {name} runs without a graph: {error}", stacklevel=4)
            return None

    def add(self, key: object, program: P, now: Callable[[], str]) -> P:
        """Keeps a program.

        Args:
            now: says for what it was traced.
        """
        self.traces += 1
        if self.traces == MANY:
            warnings.warn(
                f"jit: traced for the {MANY}th time, now for {now()}. Each set of shapes, dtypes and static values is "
                "traced and compiled anew. Pad batches to a few lengths, and give numbers that change as tensors.",
                stacklevel=4,
            )
        if len(self._programs) >= KEPT:
            del self._programs[next(iter(self._programs))]
        self._programs[key] = program
        return program

    def is_plain(self) -> bool:
        """Tells whether a call runs without a graph, which nothing that goes on or looks around it would see."""
        return self._plain or private.transforms() or in_differentiated() or private.dispatch_modes()
