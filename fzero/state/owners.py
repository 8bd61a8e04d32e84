"""Whole leaves, each on one rank: which rank has which, and the exchanges of slices that bring them there and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from fzero.base.follow import follows
from fzero.comm.axis import Axis
from fzero.comm.linear import Wire
from fzero.comm.pieces import start_exchange
from fzero.state.sharded import Sharded
from fzero.state.sliced import slice_in, slice_of, whole_of
from fzero.table.layout import Key, Layout, Slot

Leaves = dict[int, torch.Tensor]  # leaf -> the whole of it


def owners(layout: Layout, key: Key) -> Mapping[int, int]:
    """Leaf -> the rank that has it whole, of a group that is cut: all ranks have alike much to compute.

    Counted are the products of matrices, over all units whose leaves have the same optimizer; of whole leaves, as
    ranks of a tensor axis may have slices of other sizes and go by the same owners.
    """
    label, rows = layout.groups[key].row.optimizer, layout.rows
    if label not in layout.owners:
        loads, found = [0] * layout.shards, dict[int, int]()
        alike = [group for group in layout.groups.values() if group.row.cuts and group.row.optimizer == label]
        for group in alike:  # by units, so that the ranks work on one at the same time
            costs = {slot.leaf: cost(rows[slot.leaf].shape) for slot in group.slots}
            for leaf in sorted(costs, key=lambda leaf: (-costs[leaf], leaf)):
                found[leaf] = rank = loads.index(min(loads))
                loads[rank] += costs[leaf]
        layout.owners[label] = found
    return layout.owners[label]


def cost(shape: Sequence[int]) -> int:
    """What a leaf takes to be multiplied by its transpose, and at least to be read."""
    return max(1, math.prod(shape)) * (min(shape[-2:]) if len(shape) > 1 else 1)


def owned(tree: Sharded, key: Key) -> list[Slot]:
    """The leaves of a group that this rank has whole: all of them where it is not cut."""
    slots, axis = tree.layout.groups[key].slots, tree.axis_of(key)
    if axis.size == 1:
        return list(slots)
    by = owners(tree.layout, key)
    return [slot for slot in slots if by[slot.leaf] == axis.rank]


def start_whole(tree: Sharded, key: Key, slices: Sequence[torch.Tensor], what: str) -> Callable[[], list[Leaves]]:
    """Begins to bring whole leaves of a group to their owners, by one exchange.

    Args:
        slices: this rank's slices of some buffers of the group, all of one dtype.

    Returns:
        What waits for this rank's own leaves of each buffer, over the tensor axis too.
    """
    layout, axis, mine, count = tree.layout, tree.axis_of(key), owned(tree, key), len(slices)
    cuts = [_by_leaf(tree, key, own) for own in slices]
    by = owners(layout, key) if axis.size > 1 else dict.fromkeys(cuts[0], 0)
    send = [[x for cut in cuts for leaf, x in cut.items() if by[leaf] == rank] for rank in range(axis.size)]
    lengths = [[own[slot.leaf] for slot in mine] * count for own in _lengths(layout, key)]
    wait = _start_exchange(axis, send, lengths, slices[0], f"{what} of {key}")

    def finish() -> list[Leaves]:
        pieces = zip(*wait(), strict=True)  # of each leaf of each buffer, those of all ranks
        return [{slot.leaf: _whole(tree, slot, next(pieces)) for slot in mine} for _ in range(count)]

    return finish


def _whole(tree: Sharded, slot: Slot, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    own = torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0]
    return whole_of(tree.layout.rows[slot.leaf], tree.axis, own.view(slot.shape))


def start_slices(
    tree: Sharded, key: Key, leaves: Sequence[Mapping[int, torch.Tensor]], like: torch.Tensor, what: str
) -> Callable[[], list[Leaves]]:
    """Begins to bring slices back of what the owners have computed, by one exchange.

    Args:
        leaves: this rank's own leaves, whole, of each buffer.
        like: a tensor of their dtype and device.

    Returns:
        What waits for this rank's piece of each leaf of the buffers, flat.
    """
    layout, axis, mine, count = tree.layout, tree.axis_of(key), owned(tree, key), len(leaves)
    rows, slots = layout.rows, layout.groups[key].slots
    flat = [{s.leaf: slice_of(rows[s.leaf], *layout.tensor, own[s.leaf]).reshape(-1) for s in mine} for own in leaves]
    if axis.size == 1:
        return lambda: flat
    by = owners(layout, key)
    theirs = [[slot for slot in slots if by[slot.leaf] == rank] for rank in range(axis.size)]
    sizes = _lengths(layout, key)
    parts = [x.split([own[leaf] for own in sizes]) for own in flat for leaf, x in own.items()]
    send = [[part[rank] for part in parts] for rank in range(axis.size)]
    lengths = [[sizes[axis.rank][slot.leaf] for slot in own] * count for own in theirs]
    wait = _start_exchange(axis, send, lengths, like, f"{what} of {key}")

    def finish() -> list[Leaves]:
        pieces = [iter(own) for own in wait()]
        return [{slot.leaf: next(pieces[by[slot.leaf]]) for own in theirs for slot in own} for _ in range(count)]

    return finish


def _start_exchange(
    axis: Axis, send: Sequence[Sequence[torch.Tensor]], lengths: Sequence[Sequence[int]], like: torch.Tensor, tag: str
) -> Callable[[], list[Sequence[torch.Tensor]]]:
    """Begins to send each rank some flat tensors.

    Returns:
        What waits for those of every rank, which have these lengths; this rank's own stay where they are.
    """
    if axis.size == 1:
        return lambda: [*send]
    empty, own = like.new_empty(0), send[axis.rank]
    others = [rank != axis.rank for rank in range(axis.size)]
    there = [torch.cat([empty, *each]) if other else empty for each, other in zip(send, others, strict=True)]
    come = [empty.new_empty(sum(each) if other else 0) for each, other in zip(lengths, others, strict=True)]
    wait = start_exchange(axis, there, come, tag)

    def finish() -> list[Sequence[torch.Tensor]]:
        wait()
        there.clear()
        return [x.split(each) if other else own for x, each, other in zip(come, lengths, others, strict=True)]

    return finish


def joined(tree: Sharded, key: Key, pieces: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """This rank's slice of a group's buffer, of its pieces of the leaves; gaps are zero."""
    out = torch.zeros_like(tree.local(key))
    for leaf, target in _by_leaf(tree, key, out).items():
        target.copy_(pieces[leaf])
    return out


def _by_leaf(tree: Sharded, key: Key, own: torch.Tensor) -> Leaves:
    """This rank's pieces of the leaves of a group, from its slice."""
    pieces = tree.layout.cut(key, tree.rank_of(key), own)
    return {slot.leaf: piece for slot, piece in zip(tree.layout.groups[key].slots, pieces, strict=True)}


def _lengths(layout: Layout, key: Key) -> list[dict[int, int]]:
    """Rank -> leaf -> how much of it that rank has; the ranks' pieces follow one another."""
    ranks = range(layout.groups[key].shards)
    return [{slot.leaf: stop - start for slot, start, stop in layout.pieces(key, rank)} for rank in ranks]


def everywhere(tree: Sharded, key: Key) -> Leaves:
    """All whole leaves of a group on every rank, as a differentiable function of this rank's slice.

    What all ranks compute alike of them has the right cotangents where it is cut again by `slice_in`.
    """
    own, axis, tag = tree.local(key), tree.axis_of(key), f"leaves of {key}"
    if axis.size == 1 and own.numel() < tree.layout.groups[key].numel:  # one rank stands for all, as in a plan
        own = own.new_zeros(tree.layout.groups[key].numel)
    if axis.size > 1:
        own = Wire(tag, axis, own.dtype, own.dtype, own.dtype).spread(own) if follows(own) else axis.gather(own, tag)
    views, rows = tree.layout.groups[key].views(own), tree.layout.rows
    if tree.axis.tensor is None and tree.layout.tensor[1] > 1:  # the same of the tensor axis
        return {leaf: view.new_zeros(rows[leaf].shape) for leaf, view in views.items()}
    return {leaf: whole_of(rows[leaf], tree.axis, view) for leaf, view in views.items()}


def on_every_rank(
    trees: Sequence[Sharded], fn: Callable[[Slot, Sequence[torch.Tensor]], Sequence[torch.Tensor]]
) -> list[Sharded]:
    """What a function makes of whole leaves, on every rank alike, so that a transform may go on through it.

    Args:
        trees: grads, params, and those of an optimizer's state, which need not have all groups.
        fn: of a leaf of those trees that have it: its update, and what it is in each of the state's trees then.
    """
    grads, made = trees[0], [dict[Key, torch.Tensor]() for _ in trees[1:]]  # updates in the place of params
    for key in grads.groups:
        whole = [everywhere(tree, key) for tree in trees if key in tree.groups]
        slots = grads.layout.groups[key].slots
        found = {slot.leaf: fn(slot, [leaves[slot.leaf] for leaves in whole]) for slot in slots}
        out = [own for own, tree in zip(made, trees[1:], strict=True) if key in tree.groups]
        for place, own in enumerate(out):
            leaves = {leaf: each[place] for leaf, each in found.items()}
            own[key] = slice_in(grads, key, leaves, grads.local(key).dtype).clone()  # no view, which keeps the whole
    return [grads.with_buffers(own) for own in made]
