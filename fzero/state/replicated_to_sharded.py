"""What all ranks have alike where it meets slices of leaves, or becomes some; and slices that are held in full too.

Its cotangents there are summed over the slices, of which each rank knows its own part.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fzero.base.follow import follows
from fzero.comm.linear import Wire, in_pieces, in_shards
from fzero.state.sharded import Sharded
from fzero.state.whole import slice_of
from fzero.table.layout import Key


def to_sharded(tree: Sharded, key: Key, value: torch.Tensor) -> torch.Tensor:
    """A value that is the same on all ranks, for a computation with this rank's slice of a group.

    Computed with as it is, every rank would have the part of its derivative that goes through its own slice.

    Returns:
        The value; once for each element of the slice where only some of its leaves are cut over the tensor axis.
    """
    group, rows = tree.layout.groups[key], tree.layout.rows
    if len({rows[slot.leaf].slices is None for slot in group.slots}) > 1:
        return leaf_values_to_sharded(tree.only([key]), {slot.leaf: value for slot in group.slots})[key]
    if group.row.cuts:
        value = in_shards(tree.axis, value)
    return _of_leaf(tree, group.slots[0].leaf, value)


def leaf_values_to_sharded(tree: Sharded, values: Mapping[int, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """A value of each leaf, the same on all ranks, once for each element of this rank's slices.

    Args:
        values: 0-d tensors, by the leaf's number.
    """
    if not values:  # of a part of the leaves that are all frozen
        return {}
    rows, axis, numbers = tree.layout.rows, tree.axis, sorted(values)
    kinds = {leaf: (rows[leaf].cuts, rows[leaf].slices is not None) for leaf in numbers}
    every = torch.stack([values[leaf] for leaf in numbers])
    of_kind = dict[tuple[object, bool], dict[int, torch.Tensor]]()
    together = None  # zero, by which a rank that has nothing of some leaves takes part in the exchanges all the same
    for cut, sliced in dict.fromkeys(kinds.values()):  # one exchange for all leaves of a kind, on every rank
        own = in_shards(axis, every) if cut and follows(every) else every
        own = in_pieces(axis.tensor, own) if sliced and axis.tensor is not None and follows(every) else own
        of_kind[cut, sliced] = dict(zip(numbers, own.unbind(), strict=True))
        if own is not every:
            together = own.sum() * 0 if together is None else together + own.sum() * 0
    out = dict[Key, torch.Tensor]()
    for key in tree.groups:
        parts, end = list[torch.Tensor](), 0
        for slot, _, stop in tree.layout.pieces(key, tree.rank_of(key)):
            # in the gap before it there is nothing to compute with
            parts.append(of_kind[kinds[slot.leaf]][slot.leaf].expand(stop - end))
            end = stop
        # and behind the last one nothing either, but a number that may be computed with
        own = torch.cat([*parts, every[0].detach().expand(tree.layout.shard_numel(key) - end)])
        out[key] = own if together is None else own + together
    return out


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
