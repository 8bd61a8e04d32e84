"""A leaf's values out of slices that are cut otherwise, and as codes again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fzero.formats.formats import ALIGN, Companded, Format, decode, encode
from fzero.formats.ops import Ops
from fzero.state.sliced import Sliced, in_order, slice_of
from fzero.table.layout import Layout, Slot


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
    old: Sliced | None,
    read: Callable[[int, int], Sequence[torch.Tensor]],
    first: int,
    last: int,
    into: Sequence[torch.Tensor],
) -> None:
    """Fills the parts of elements [first, last) of this rank's slice of a leaf from slices that are cut otherwise.

    Args:
        read: the parts of the first elements of a rank's slice, so many of them.
    """
    shape = layout.rows[slot.leaf].shape
    ranks = range(len(old.pieces) if old is not None else 1)
    if first == last:
        for rank in ranks:
            read(rank, 0)  # who needs none of it takes part
        return
    parts = list[torch.Tensor]()
    for rank in ranks:
        own = shape if old is None else old.shape(shape, rank)
        count = math.prod(own)
        parts.append(decode(have, read(rank, count), wide(form))[:count].view(own))
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
