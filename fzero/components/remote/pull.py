"""Bringing values to who needs them, straight from the ranks where they lie."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero.components.remote.failure import Failed, Failure
from fzero.components.remote.layout import Layout, Read, joined, layout_of, reads_of
from fzero.components.remote.link import Kept, Place
from fzero.components.remote.specs import axes_of
from fzero.components.remote.values import Box, Name

Leaf = tuple[Any, ...]  # of an operand: what it is first, as `Value.leaf` makes it
Reads = dict[tuple[str, int], dict[tuple[Name, Box | None], torch.Tensor | None]]  # of a component's rank
Boxes = Callable[[Layout], Box | None]  # what of a tensor is wanted; None is all of it


class Table:
    """A component's ranks: where each is, and how it is asked.

    Args:
        sources: of each rank its `Host`, in this process, or a `RemoteSource`.
    """

    def __init__(self, name: str, places: Sequence[Place], sources: Sequence[Any]) -> None:
        self.name, self.places, self.sources = name, places, sources
        self._groups: dict[tuple[str, ...], list[list[list[int]]]] = {}

    def groups(self, axes: tuple[str, ...]) -> list[list[list[int]]]:
        """For each piece of what lies over some axes the ranks that have it, copies of each of a mean together."""
        if axes not in self._groups:
            found: list[dict[int, list[int]]] = [{} for _ in range(self.places[0].piece(axes)[1])]
            for rank, place in enumerate(self.places):
                found[place.piece(axes)[0]].setdefault(place.mean_rank, []).append(rank)
            self._groups[axes] = [[same[number] for number in sorted(same)] for same in found]
        return self._groups[axes]


def whole(_: Layout) -> None:
    """All of a tensor."""


class Puller:
    """What one reader knows of the components that it reads from.

    Args:
        choice: its number among readers, which take different copies.

    Attributes:
        device: where values are brought to.
    """

    def __init__(self, choice: int = 0) -> None:
        self.choice, self.device = choice, torch.device("cpu")
        self.tables: dict[str, Table] = {}
        self._ended = Kept[str, str]()  # names of components that it knows no more

    def forget(self, component: str) -> None:
        """Lets go of a component that has ended: of its ranks in this process, and of connections to others."""
        table = self.tables.pop(component, None)
        if table is not None:
            self._ended[component] = table.name
            for source in table.sources:
                source.left()

    def table(self, component: str) -> Table:
        """Where a component's values are."""
        try:
            return self.tables[component]
        except KeyError:
            raise lost(component, self._ended.get(component, component), 0, "has ended") from None

    def layouts(self, component: str, names: Sequence[Name]) -> list[Layout]:
        """The layouts of a component's values, once these are there."""
        table = self.table(component)
        ranks = [self.choice % len(table.sources)]
        found = {ranks[0]: table.sources[ranks[0]].metas(names)}
        if any(isinstance(meta, Failure) or meta.digest is not None for meta in found[ranks[0]]):
            ranks = [*range(len(table.sources))]  # the first failure may be another one's, and digests are compared
        else:
            own = {name for meta in found[ranks[0]] for name in axes_of(meta.dims)}
            axes = tuple([name for name, _, _ in table.places[0].axes if name in own])
            groups = [[*itertools.chain(*same)] for same in table.groups(axes)]
            ranks = [ranks[0] if ranks[0] in same else same[self.choice % len(same)] for same in groups]
        found.update({rank: table.sources[rank].metas(names) for rank in ranks if rank not in found})
        columns = zip(*[found[rank] for rank in ranks], strict=True)
        return [layout_of(metas, [table.places[rank] for rank in ranks], table.name) for metas in columns]

    def pulled(self, wanted: Sequence[tuple[Leaf, Boxes]]) -> list[torch.Tensor]:
        """The tensors of operands."""
        away = [(leaf, box_of) for leaf, box_of in wanted if leaf[0] in ("value", "fill")]
        layouts = self._layouts_of([leaf for leaf, _ in away])
        reads: Reads = {}
        plans: list[tuple[Leaf, Layout, Box | None, list[list[Read]]]] = []
        for leaf, box_of in away:
            layout = layouts[leaf[1], leaf[2]]
            box = box_of(layout)
            groups = self.table(leaf[1]).groups(layout.axes) if leaf[0] == "value" else []
            blocks = reads_of(layout, groups, box, self.choice) if groups else []
            plans.append((leaf, layout, box, blocks))
            for read in itertools.chain(*blocks):
                reads.setdefault((leaf[1], read.rank), {})[leaf[2], read.box] = None
        for (component, rank), own in reads.items():
            found = self.table(component).sources[rank].blocks([*own], self.device)
            own.update(zip([*own], [x.to(self.device) for x in found], strict=True))
        tensors = iter([self._made(*plan, reads) for plan in plans])
        return [next(tensors) if leaf[0] in ("value", "fill") else leaf[1].to(self.device) for leaf, _ in wanted]

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
        self, leaf: Leaf, layout: Layout, box: Box | None, blocks: list[list[Read]], reads: Reads
    ) -> torch.Tensor:
        if leaf[0] == "fill":
            shape = layout.shape if box is None else [stop - start for start, stop in box]
            return torch.full(shape, leaf[3], dtype=leaf[4] or layout.dtype, device=self.device)
        parts = [[(read, reads[leaf[1], read.rank][leaf[2], read.box]) for read in block] for block in blocks]
        made = joined(layout, box, parts)  # type: ignore[arg-type]
        return made.to(self.device)  # also where it has no elements, which nobody sent


def lost(component: str, name: str, rank: int, why: str) -> Failed:
    """What is told where a rank cannot be reached any more."""
    return Failed(Failure("ComponentDied", why, name, rank, lost=component))
