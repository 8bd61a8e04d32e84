"""What all ranks have alike where it meets slices of leaves, or becomes some; and slices that are held in full too.

Its cotangents there are summed over the slices, of which each rank knows its own part.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fzero.comm.linear import Wire, in_pieces, in_shards
from fzero.state.sharded import Sharded
from fzero.state.sliced import slice_of
from fzero.table.layout import Key


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
