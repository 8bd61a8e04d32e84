"""What each rank of a mesh keeps of each leaf: its slice along a dim, and of that its flat piece."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fzero.table.layout import Layout
from fzero.table.ranks import Ranks, joined
from fzero.table.rows import Row


class Held(NamedTuple):
    """A rank's part of one leaf.

    Attributes:
        dim: that the leaf is cut along over the tensor axis; None where the rank's slice is all of it.
        ranges: (start, size) of the slice's pieces along that dim, one after the other.
        shape: of the slice.
        start, stop: the elements of the slice, in row-major order, that are the rank's own where state is cut flat.
    """

    dim: int | None
    ranges: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Holdings:
    """The parts of all leaves on all ranks, found as they are asked for."""

    rows: tuple[Row, ...]
    ranks: Ranks
    _layouts: dict[int, Layout] = field(default_factory=dict, repr=False, compare=False)

    def layout(self, rank: int) -> Layout:
        """The layout of a rank's buffers."""
        place, size = self.ranks.place(self.ranks.tensor, rank), self.ranks.size(self.ranks.tensor)
        if place not in self._layouts:
            self._layouts[place] = Layout.build(self.rows, self.ranks.size(self.ranks.sharded), (place, size))
        return self._layouts[place]

    def of(self, path: str, rank: int) -> Held:
        """A rank's part of the leaf at a path."""
        layout = self.layout(rank)
        key, slot = layout.key_of[path]
        row, own = layout.rows[slot.leaf], layout.shard_numel(key)
        number = self.ranks.place(self.ranks.sharded, rank) if row.cuts else 0
        start, stop = (min(max(bound - slot.offset, 0), slot.numel) for bound in (number * own, (number + 1) * own))
        ranges = () if row.slices is None else row.slices.ranges(layout.tensor[1])[layout.tensor[0]]
        return Held(row.slices and row.slices.dim, tuple(ranges), slot.shape, start, stop)


def cuts_of(row: Row, ranks: Ranks) -> str:
    """The axes that cut a leaf, and how, in words: `tp: dim 1 (4×1024), dp: flat`."""
    out = []
    if row.slices is not None:
        sizes = row.slices.sizes(ranks.size(ranks.tensor))
        out.append(f"{joined(ranks.tensor)}: dim {row.slices.dim} ({_runs(sizes)})")
    if row.cuts:
        out.append(f"{joined(ranks.sharded)}: flat")
    return ", ".join(out) or "whole"


def _runs(sizes: Sequence[int]) -> str:
    """Sizes in words, equal ones together: `2×3 + 2×2`."""
    return " + ".join(f"{len([*run])}×{size}" for size, run in itertools.groupby(sizes))
