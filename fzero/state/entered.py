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
    """
    row, over = tree.layout.groups[key].row, tree.axis.tensor
    if row.cuts:
        value = in_shards(tree.axis, value)
    if row.slices is not None and over is not None:
        value = in_pieces(over, value)
    return value


def cuts(tree: Sharded) -> bool:
    """Tells whether this rank has slices of some leaves."""
    return tree.axis.size > 1 or tree.axis.place_on_tensor[1] > 1


def slice_in(tree: Sharded, key: Key, leaves: Mapping[int, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """This rank's slice of a group, as a differentiable function of its whole leaves, which all ranks have alike."""
    group, rows = tree.layout.groups[key], tree.layout.rows
    own = [slice_of(rows[s.leaf], tree.axis, entered(tree, key, leaves[s.leaf])).to(dtype) for s in group.slots]
    size = tree.layout.shard_numel(key)
    return group.joined(own, dtype, own[0].device).narrow(0, tree.rank_of(key) * size, size)


def held_of(axis: Axis, shard: torch.Tensor, tag: str) -> torch.Tensor:
    """The full buffer of a slice, in which others' are constants, as what goes on through a tree does by its slice."""
    if axis.size == 1:
        return shard
    every = Wire(tag, axis, shard.dtype, shard.dtype, shard.dtype).spread(shard.detach())
    size, rank = shard.shape[0], axis.rank
    return torch.cat([every[: rank * size], shard, every[(rank + 1) * size :]])
