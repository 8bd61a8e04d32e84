"""Leaves that are cut over a tensor axis, or were otherwise; and what all ranks have alike where it meets slices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.comm.linear import Wire, in_pieces, in_shards, linear
from fzero.formats.formats import ALIGN, Companded, Format, decode, encode
from fzero.formats.ops import Ops
from fzero.state.sharded import Sharded
from fzero.table.layout import Key, Layout, Slot
from fzero.table.rows import Row
from fzero.table.slices import Slices

LARGE = 1 << 16  # elements of a vector whose state is cut, too
Piece = tuple[int, int]  # its start and its size along a dim


class Sliced(NamedTuple):
    """Where the slices of a leaf lie in it, each as some pieces along one dim, one after the other."""

    dim: int  # of the leaf
    # rank -> its pieces in ascending order, none of them empty or continued by the next one
    pieces: tuple[tuple[Piece, ...], ...]

    def shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of a rank's slice."""
        return (*shape[: self.dim], sum(size for _, size in self.pieces[rank]), *shape[self.dim + 1 :])

    def keeps_blocks(self, shape: Sequence[int], size: int) -> bool:
        """Tells whether all elements of a block of `size` elements of the leaf are, in their order, one of a slice."""
        inner = math.prod(shape[self.dim + 1 :])
        edges = [edge for own in self.pieces for begin, count in own for edge in (begin, begin + count)]
        return all(edge * inner % size == 0 for edge in (*edges, shape[self.dim]))


def sliced_in(layout: Layout, leaf: int) -> Sliced | None:
    """How a leaf of a layout is cut; None where every rank of the tensor axis has all of it."""
    slices, ranks = layout.rows[leaf].slices, layout.tensor[1]
    if slices is None or ranks == 1:
        return None
    found = []
    for ranges in slices.ranges(ranks):
        own: list[Piece] = []
        for start, size in ranges:
            if own and sum(own[-1]) == start:
                own[-1] = own[-1][0], own[-1][1] + size
            elif size:
                own.append((start, size))
        found.append(tuple(own))
    return Sliced(slices.dim, tuple(found))


def in_order(ranges: Sequence[Sequence[Piece]], every: torch.Tensor, dim: int) -> torch.Tensor:
    """The whole of all ranks' slices, which lie one after the other.

    Args:
        ranges: rank -> the start and the size of its pieces along the dim.
    """
    own = [piece for of_rank in ranges for piece in of_rank]
    parts = every.split([size for _, size in own], dim)
    return torch.cat([parts[place] for place in sorted(range(len(own)), key=own.__getitem__)], dim)


def lies_in_slices(shape: Sequence[int]) -> bool:
    """Whether an optimizer on whole leaves keeps what it has in the shape of such a leaf in slices: of matrices.

    A matrix of one row or column is a vector, whose factors would be of its shape: slices are kept for all leaves.
    """
    return (len(shape) > 1 and min(shape[-2:]) > 1) or math.prod(shape) >= LARGE


def slice_of(row: Row, rank: int, ranks: int, full: torch.Tensor) -> torch.Tensor:
    """The slice of a whole leaf of a rank of that many; the leaf itself where it is not cut."""
    return full if row.slices is None else cut(row.slices, rank, ranks, full)


def cut(slices: Slices, rank: int, ranks: int, full: torch.Tensor, leading: int = 0) -> torch.Tensor:
    """A rank's pieces of a whole leaf, one after the other.

    Args:
        leading: dims before the leaf's own.
    """
    dim = slices.dim + leading
    return torch.cat([full.narrow(dim, start, size) for start, size in slices.ranges(ranks)[rank]], dim)


def whole_of(row: Row, axis: Axis, own: torch.Tensor, leading: int = 0) -> torch.Tensor:
    """The whole leaf, of this rank's slice and the others', as a differentiable function of this one.

    Args:
        leading: dims of the slice before the leaf's own.
    """
    over, slices = axis.tensor, row.slices
    if slices is None or over is None or over.size == 1:
        return own
    there = functools.partial(_joined, slices, over, leading, f"gather of leaf {row.path!r}")
    return linear(there, functools.partial(cut, slices, over.rank, over.size, leading=leading), own)


def _joined(slices: Slices, over: Axis, leading: int, tag: str, own: torch.Tensor) -> torch.Tensor:
    """The whole leaf of all ranks' pieces."""
    dim = slices.dim + leading
    every = pieces.gathered(over, own, dim, slices.sizes(over.size), tag)
    return every if len(slices.parts) == 1 else in_order(slices.ranges(over.size), every, dim)


def to_sharded(tree: Sharded, key: Key, value: torch.Tensor) -> torch.Tensor:
    """A value that is the same on all ranks, for a computation with this rank's slice of a group.

    Computed with as it is, every rank would have the part of its derivative that goes through its own slice.

    Returns:
        The value; once for each element of the slice where only some of its leaves are cut over the tensor axis.
    """
    group, size, end = tree.layout.groups[key], tree.layout.shard_numel(key), 0
    value = in_shards(tree.axis, value) if group.row.cuts else value
    own = {tree.layout.rows[slot.leaf].slices is not None: slot.leaf for slot in group.slots}
    kinds = {sliced: _of_leaf(tree, leaf, value) for sliced, leaf in own.items()}
    if len(kinds) == 1:
        return next(iter(kinds.values()))
    parts = list[torch.Tensor]()
    for slot, _, stop in tree.layout.pieces(key, tree.rank_of(key)):  # each with the gap before it
        parts.append(kinds[tree.layout.rows[slot.leaf].slices is not None].expand(stop - end))
        end = stop
    return torch.cat([*parts, value.detach().expand(size - end)])


def _of_leaf(tree: Sharded, leaf: int, value: torch.Tensor) -> torch.Tensor:
    """What all ranks have alike, for a computation with this rank's pieces of a leaf, or with the whole one."""
    over = tree.axis.tensor
    return value if over is None or tree.layout.rows[leaf].slices is None else in_pieces(over, value)


def cuts(tree: Sharded) -> bool:
    """Tells whether this rank has slices of some leaves."""
    return tree.axis.size > 1 or tree.axis.place_on_tensor[1] > 1


def slice_in(tree: Sharded, key: Key, leaves: Mapping[int, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """This rank's slice of a group, as a differentiable function of its whole leaves, which all ranks have alike.

    It is in memory of its own, or whoever keeps it would keep the whole.
    """
    group, rows, axis = tree.layout.groups[key], tree.layout.rows, tree.axis
    whole = {s.leaf: in_shards(axis, leaves[s.leaf]) if group.row.cuts else leaves[s.leaf] for s in group.slots}
    pieces = {leaf: _of_leaf(tree, leaf, value) for leaf, value in whole.items()}
    own = [slice_of(rows[leaf], *tree.layout.tensor, value).to(dtype) for leaf, value in pieces.items()]
    size = tree.layout.shard_numel(key)
    full = group.joined(own, dtype, own[0].device)
    return full if size == group.numel else full.narrow(0, tree.rank_of(key) * size, size).clone()


def held_of(tree: Sharded, key: Key, values: torch.Tensor, dtype: torch.dtype | None, tag: str) -> torch.Tensor:
    """The full buffer that is computed with, of the values of a slice of params.

    Others' slices are constants in it, as what goes on through a tree does by its slice.
    """
    axis, own = tree.axis_of(key), values.to(dtype)
    if axis.size == 1:
        return own
    every = Wire(tag, axis, own.dtype, own.dtype, own.dtype).spread(own.detach())
    size, rank = own.shape[0], axis.rank
    return torch.cat([every[: rank * size], own, every[(rank + 1) * size :]])


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
