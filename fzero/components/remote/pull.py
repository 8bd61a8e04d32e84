"""Bringing values to who needs them, straight from the ranks where they lie."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from fzero.components.remote.failure import Failed, Failure
from fzero.components.remote.layout import Layout, Read, joined, layout_of, reads_of
from fzero.components.remote.values import Meta, Name
from fzero.state.gather import sum_by_leaf

Leaf = tuple[Any, ...]  # of an operand: what it is first, as `Value.leaf` makes it
Reads = dict[tuple[str, int, int], dict[tuple[Name, int, int], torch.Tensor | None]]  # of a component's rank
Rows = Callable[[Layout], tuple[int, int] | None]  # which of a tensor are wanted; None is all of it


class Source(Protocol):
    """One rank, as others ask it."""

    def metas(self, names: Sequence[Name]) -> list[Meta | Failure]: ...

    def rows(self, wanted: Sequence[tuple[Name, int, int]]) -> list[torch.Tensor]: ...

    def trees(self, call: int) -> object: ...

    def arrived(self, call: int) -> Failure | None: ...


class Table(NamedTuple):
    """A component's ranks.

    Attributes:
        sources: for each data rank those with its examples: of each that means are taken over, it and its copies.
    """

    name: str
    sources: Sequence[Sequence[Sequence[Source]]]

    @property
    def every(self) -> list[Source]:
        return [source for same in self.sources for copies in same for source in copies]


def whole(_: Layout) -> None:
    """All rows."""


class Puller:
    """What one reader knows of the components that it reads from.

    Args:
        choice: its number among readers, which take different copies.
    """

    def __init__(self, choice: int = 0) -> None:
        self.choice = choice
        self.tables: dict[str, Table] = {}

    def _source(self, component: str, data_rank: int, copy: int = 0) -> Source:
        copies = self.tables[component].sources[data_rank][copy]
        return copies[self.choice % len(copies)]

    def layouts(self, component: str, names: Sequence[Name]) -> list[Layout]:
        """The layouts of a component's values, once these are there."""
        table = self.tables[component]
        columns = [self._source(component, rank).metas(names) for rank in range(len(table.sources))]
        return [layout_of(metas, table.name, len(table.sources[0])) for metas in zip(*columns, strict=True)]

    def pulled(self, wanted: Sequence[tuple[Leaf, Rows]]) -> list[torch.Tensor | None]:
        """The tensors of operands.

        Raises:
            Failed: one of them could not be made.
        """
        parts = [(part, rows) for leaf, rows in wanted for part in _parts(leaf)]
        away = [(leaf, rows) for leaf, rows in parts if leaf[0] in ("value", "fill")]
        layouts = self._layouts_of([leaf for leaf, _ in away])
        reads: Reads = {}
        plans: list[tuple[Leaf, Layout, tuple[int, int] | None, list[Read]]] = []
        for leaf, rows in away:
            layout = layouts[leaf[1], leaf[2]]
            span = rows(layout) if layout.shape else None
            own = reads_of(layout, span, self.choice) if leaf[0] == "value" else []
            plans.append((leaf, layout, span, own))
            for read in own:
                reads.setdefault((leaf[1], read.data_rank, read.copy), {})[leaf[2], read.start, read.stop] = None
        for (component, rank, copy), own in reads.items():
            found = self._source(component, rank, copy).rows([*own])
            own.update(zip([*own], found, strict=True))
        tensors = iter([self._made(plan, reads) for plan in plans])
        return [_computed(leaf, tensors) for leaf, _ in wanted]

    def _layouts_of(self, leaves: Sequence[Leaf]) -> dict[tuple[str, Name], Layout]:
        by_component: dict[str, list[Name]] = {}
        for leaf in leaves:
            by_component.setdefault(leaf[1], []).append(leaf[2])
        found: dict[tuple[str, Name], Layout] = {}
        for component, names in by_component.items():
            unique = [*dict.fromkeys(names)]
            for name, layout in zip(unique, self.layouts(component, unique), strict=True):
                found[component, name] = layout
        return found

    def _made(
        self,
        plan: tuple[Leaf, Layout, tuple[int, int] | None, list[Read]],
        reads: Reads,
    ) -> torch.Tensor:
        leaf, layout, span, own = plan
        if leaf[0] == "fill":
            shape = layout.shape if span is None else (span[1] - span[0], *layout.shape[1:])
            return torch.full(shape, leaf[3], dtype=leaf[4] or layout.dtype, device="cpu")
        parts = [reads[leaf[1], read.data_rank, read.copy][leaf[2], read.start, read.stop] for read in own]
        return joined(layout, span, [part for part in parts if part is not None], self.tables[leaf[1]].name)


def _parts(leaf: Leaf) -> list[Leaf]:
    """The leaves that an operand is computed of."""
    return [part for own in leaf[1] for part in _parts(own)] if leaf[0] in ("norm", "sum") else [leaf]


def _computed(leaf: Leaf, tensors: Iterator[torch.Tensor]) -> Any:
    """An operand's value, of the next tensors."""
    if leaf[0] in ("value", "fill"):
        return next(tensors)
    if leaf[0] in ("norm", "sum"):
        own = [_computed(part, tensors) for part in leaf[1]]
        return norm_by(own) if leaf[0] == "norm" else functools.reduce(torch.add, own)
    return leaf[1]


def norm_by(squares: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of what has these squares by leaf, added up as fz.global_norm does."""
    return sum_by_leaf(torch.cat([*squares]).unbind()).sqrt()


def lost(component: str, name: str, rank: int, why: str) -> Failed:
    """What is told where a rank cannot be reached any more."""
    return Failed(Failure("ComponentDied", why, name, rank, lost=component))
