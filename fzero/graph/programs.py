"""What graphs of steps and of functions keep: a program for each signature."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Generic, TypeVar

from fzero.base import private, pytree
from fzero.base.context import during, in_differentiated
from fzero.comm import backend, pieces
from fzero.graph.errors import refusing
from fzero.graph.numbers import as_tensor

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
        self._begun: dict[object, None] = {}  # what had its first run
        self._heard: dict[object, list[tuple[int, ...]]] = {}  # what ranks told each other there

    def called(
        self, name: str, first: object, own: Callable[[], Any], make: Callable[[], P], ranks: bool = False
    ) -> tuple[Any, P | None]:
        """What a run without a graph returns, if it is the first one or nothing can be traced, and the program.

        The first run proves that the function is pure. On several ranks it is the first call of all, which all make at
        once, whatever shapes each is given: messages come in one order, and no rank may send what others do not.

        Args:
            first: what such a run is made for once.
            ranks: whether others run their graphs, so that this must be traced.
        """
        out = None
        if first not in self._begun:
            with during(pieces.heard, self._heard):
                out = own()
            self._begun[first] = None
            if len(self._begun) > KEPT:
                del self._begun[next(iter(self._begun))]
        try:
            return out, make()
        except Exception as error:
            if not self.fallback or ranks:
                raise
            self._plain = True
            warnings.warn(f"jit: {name} runs without a graph: {error}", stacklevel=5)
            return own() if out is None else out, None

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        with refusing(), during(pieces.heard, self._heard):
            yield

    def taken(self, inputs: Sequence[object], is_leaf: pytree.Test | None = None) -> list[object]:
        """Inputs with numbers of Python as tensors, but for those that are static."""
        for i in self.static:
            if i < len(inputs) and pytree.tensors_in(inputs[i]):
                raise ValueError(f"jit: got a tensor in input {i}, which is static; expected values, such as numbers.")
        own = enumerate(inputs)
        return [x if i in self.static else pytree.map_leaves(as_tensor, x, is_leaf) for i, x in own]

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
