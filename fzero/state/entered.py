"""What all ranks have alike where it meets slices of leaves, or becomes some; and slices that are held in full too.

Its cotangents there are summed over the slices, of which each rank knows its own part.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fzero.comm.axis import Axis
from fzero.comm.linear import Wire, in_pieces, in_shards
from fzero.state.sharded import Sharded
from fzero.state.whole import slice_of
from fzero.table.layout import Key


def entered(tree: Sharded, key: Key, value: torch.Tensor) -> torch.Tensor:
    """A value that is the same on all ranks, for a computation with this rank's slice of a group.

    Computed with as it is, every rank would have the part of its derivative that goes through its own slice.

    Returns:
        The value; once for each element of the slice where only some of its leaves are cut over the tensor axis.
    """
    group, rows = tree.layout.groups[key], tree.layout.rows
    if group.row.cuts:
        value = in_shards(tree.axis, value)
    of_leaf = {slot: _of_leaf(tree, slot.leaf, value) for slot in group.slots}
    if len({rows[slot.leaf].slices is None for slot in group.slots}) == 1:
        return next(iter(of_leaf.values()))
    parts, end = list[torch.Tensor](), 0
    for slot, start, stop in tree.layout.pieces(key, tree.rank_of(key)):
        parts += [value.expand(start - end), of_leaf[slot].expand(stop - start)]
        end = stop
    return torch.cat([*parts, value.expand(tree.layout.shard_numel(key) - end)])


def _of_leaf(tree: Sharded, leaf: int, value: torch.Tensor) -> torch.Tensor:
    """What all ranks have alike, for a computation with this rank's pieces of a leaf, or with the whole one."""
    over = tree.axis.tensor
    return value if over is None or tree.layout.rows[leaf].slices is None else in_pieces(over, value)


def cuts(tree: Sharded) -> bool:
    """Tells whether this rank has slices of some leaves."""
    return tree.axis.size > 1 or tree.axis.place_on_tensor[1] > 1


def slice_in(tree: Sharded, key: Key, leaves: Mapping[int, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """This rank's slice of a group, as a differentiable function of its whole leaves, which all ranks have alike."""
    group, rows, axis = tree.layout.groups[key], tree.layout.rows, tree.axis
    whole = {s.leaf: in_shards(axis, leaves[s.leaf]) if group.row.cuts else leaves[s.leaf] for s in group.slots}
    own = [slice_of(rows[leaf], axis, _of_leaf(tree, leaf, value)).to(dtype) for leaf, value in whole.items()]
    size = tree.layout.shard_numel(key)
    return group.joined(own, dtype, own[0].device).narrow(0, tree.rank_of(key) * size, size)


def held_of(axis: Axis, shard: torch.Tensor, tag: str) -> torch.Tensor:
    """The full buffer of a slice, in which others' are constants, as what goes on through a tree does by its slice."""
    if axis.size == 1:
        return shard
    every = Wire(tag, axis, shard.dtype, shard.dtype, shard.dtype).spread(shard.detach())
    size, rank = shard.shape[0], axis.rank
    return torch.cat([every[: rank * size], shard, every[(rank + 1) * size :]])
