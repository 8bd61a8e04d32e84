"""The values that a state is made from, leaf by leaf; out of slices that are cut otherwise, and as codes again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fzero.formats.formats import ALIGN, Companded, Format, decode, encode
from fzero.formats.ops import Ops
from fzero.state.sliced import Sliced, in_order, slice_of
from fzero.table.layout import Layout, Slot


class Source(Protocol):
    """The values of one tree, by the paths of its leaves."""

    def format(self, path: str) -> Format | None:
        """What a leaf is stored as; None where there is none."""
        ...

    def sliced(self, path: str) -> Sliced | None:
        """How a leaf that there is is cut into slices; None where it is whole."""
        ...

    def read(
        self, path: str, start: int, stop: int, into: Sequence[torch.Tensor] | None, rank: int = 0
    ) -> Sequence[torch.Tensor]:
        """The parts of elements [start, stop) of a slice of a leaf, or of the whole leaf; the range may be empty.

        Every rank asks for its range of every leaf, in the same order; and at least once for something of each slice
        where it needs another one than that of its own number.

        Args:
            start: a multiple of 64 where elements share an entry of a part.
            into: where they may be written, of exactly their sizes, until the origin's `wait` returns; what is
                returned without it has arrived.
            rank: which slice.
        """
        ...


def wide(form: Format) -> torch.dtype:
    """The dtype that values are decoded to for a format."""
    return torch.float64 if form.parts[0].dtype == torch.float64 else torch.float32


def keep_blocks(shape: Sequence[int], *cuts: Sliced | None) -> bool:
    """Tells whether elements that share a scale stay together in all of these cuts."""
    last = max(cut.dim for cut in cuts if cut is not None)
    return math.prod(shape[last:]) % ALIGN == 0 and all(
        cut is None or cut.dim < last or cut.keeps_blocks(shape, ALIGN) for cut in cuts
    )


def regroup(
    form: Format,
    have: Format,
    layout: Layout,
    slot: Slot,
    source: Source,
    first: int,
    last: int,
    into: Sequence[torch.Tensor],
) -> None:
    """Fills the parts of elements [first, last) of this rank's slice of a leaf from slices that are cut otherwise."""
    old, shape = source.sliced(slot.path), layout.rows[slot.leaf].shape
    ranks = range(len(old.pieces) if old is not None else 1)
    if first == last:
        for rank in ranks:
            source.read(slot.path, 0, 0, None, rank)  # who needs none of it takes part
        return
    parts = list[torch.Tensor]()
    for rank in ranks:
        own = shape if old is None else old.shape(shape, rank)
        count = math.prod(own)
        parts.append(decode(have, source.read(slot.path, 0, count, None, rank), wide(form))[:count].view(own))
    whole = parts[0] if old is None else in_order(old.pieces, torch.cat(parts, old.dim), old.dim)
    mine = slice_of(layout.rows[slot.leaf], *layout.tensor, whole)
    values = whole.new_zeros(-(-(last - first) // ALIGN) * ALIGN)
    values[: last - first] = mine.reshape(-1)[first:last]
    for target, value in zip(into, codes_of(form, values), strict=True):  # the same where blocks stay together
        target.copy_(value[: target.numel()])


@dataclass(frozen=True)
class _OtherScale(Companded):
    """The same codes with another power of two than the least one as their group's scale."""

    by: int = 0

    def scale(self, o: Ops, largest: torch.Tensor) -> torch.Tensor:
        return (super().scale(o, largest) + self.by).clamp(0, 253)


def codes_of(form: Format, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The parts of float32 values that a format has decoded, to the bit; the nearest to others.

    Rounding may leave a group without the large value that its scale was for, so that the least scale for its values,
    or the next smaller one, does not have codes for all of them.
    """
    parts = encode(form, values)
    if not isinstance(form, Companded):
        return parts
    for by in (1, -1):
        other = encode(_OtherScale(form.signed, form.width, by), values)
        there = decode(form, other, values.dtype).view(torch.int32) == values.view(torch.int32)
        there = there.view(-1, form.group).all(1, keepdim=True)
        pairs = [(x.view(len(there), -1), y.view(len(there), -1)) for x, y in zip(other, parts, strict=True)]
        parts = tuple(torch.where(there, x, y).view(-1) for x, y in pairs)
    return parts
