"""What a checkpoint keeps of a tree: slices of leaves, and the formats that they are stored in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fzero.checkpoint.manifest import DTYPES
from fzero.formats.formats import ALIGN, Blocks, Companded, Corrected, Exact, Format, Plain, entries
from fzero.state.sharded import Sharded
from fzero.table.layout import Key, Layout


class Run(NamedTuple):
    """Consecutive elements of a leaf, or of this rank's slice of it, in one part of its format.

    Attributes:
        leaf: its index.
        start, stop: in elements of the leaf or the slice, row by row; start is a multiple of 64.
        low, high: in entries of the part, from where the range begins.
    """

    leaf: int
    start: int
    stop: int
    low: int
    high: int


def runs(layout: Layout, key: Key, form: Format, low: int, high: int) -> Iterator[tuple[int, list[Run]]]:
    """What the range [low, high) of the full buffer of a group holds, by the number of the format's part."""
    for number, part in enumerate(form.parts):
        found = []
        for slot in layout.groups[key].slots:
            start, stop = max(low, slot.offset), min(high, slot.offset + slot.numel)
            if start < stop:
                at, count = (start - low) // part.every, entries(form, part, stop - start)
                found.append(Run(slot.leaf, start - slot.offset, stop - slot.offset, at, at + count))
        yield number, found


def written(layout: Layout, leaf: int) -> bool:
    """Tells whether this rank of the tensor axis writes its part of a leaf: of copies one does, by turns."""
    rank, ranks = layout.tensor
    return layout.rows[leaf].slices is not None or leaf % ranks == rank


def share(tree: Sharded, key: Key) -> tuple[int, int, int]:
    """Where this rank's buffer of a group begins, and the range that it saves: ranks with the same one divide it."""
    size, axis = tree.layout.shard_numel(key), tree.axis_of(key)
    copies, number = axis.ranks // axis.size, axis.data_rank // axis.size
    base, blocks = tree.rank_of(key) * size, size // ALIGN
    return base, base + blocks * number // copies * ALIGN, base + blocks * (number + 1) // copies * ALIGN


def format_named(name: str, kind: str) -> Format | None:
    """The format of a kind of tree by its name; None where this version knows none."""
    known = [
        *[Plain(dtype, rounds) for dtype in DTYPES.values() for rounds in (False, True)],
        *[Companded(kind == "signed", width) for width in (8, 4)],
        *(Exact(), Corrected(), Blocks()),
    ]
    return next((form for form in known if str(form) == name), None)
