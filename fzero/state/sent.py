"""What the ranks of a step send each other, and for what."""

from __future__ import annotations

import collections
import re
from typing import NamedTuple

import torch

from fzero.base.patterns import ROOT
from fzero.formats.formats import Blocks, nbytes
from fzero.state.moments import init_moments
from fzero.state.owners import sent_whole
from fzero.state.sharded import Sharded
from fzero.table.layout import Key, Layout
from fzero.table.ranks import Ranks, joined
from fzero.table.spec import Spec

OF_PARAMS = ("params", "grads", "replicas", "leaves")  # what is sent for the sake of params


class Sent(NamedTuple):
    """What a rank sends over one axis for one purpose.

    Attributes:
        axis: a mesh axis, or several that are taken as one, `dp×sp`.
        purpose: "params" (gathers), "grads" (reductions), "replicas" (their means of grads), "leaves" (whole ones,
            to the rank that updates each, and what it makes of them back), "leaf norms" (that an optimizer wants),
            "agreement" (that `fz.whole` has failed on no rank: words, without bytes here), "norm", "loss" or
            "function" (its own maps).
        messages: collectives that it takes part in.
        nbytes: that it sends in them; of a sum over n ranks as many as go round a ring, 2 (n - 1) / n of its size.
    """

    axis: str
    purpose: str
    messages: int
    nbytes: int


def sent_of(step: Spec, layout: Layout, like: Sharded, ranks: Ranks, rank: int) -> list[Sent]:
    """All that a rank sends in a step of one microbatch, whose units run once, in the order of their names.

    Args:
        like: the state's params, on the meta device.
    """
    size, copies, slices = (ranks.size(axes) for axes in (ranks.sharded, ranks.copies, ranks.tensor))
    over, replicas, tensor = (joined(axes) for axes in (ranks.sharded, ranks.copies, ranks.tensor))
    times, counts = pullbacks(step), collections.Counter[tuple[str, str]]()
    sizes = collections.Counter[tuple[str, str]]()

    def add(axis: str, purpose: str, messages: int, each: int, among: int) -> None:
        if among > 1 and messages:
            counts[axis, purpose] += messages
            sizes[axis, purpose] += messages * each

    for key, group in layout.groups.items():
        row, policy, own = group.row, group.row.policy, layout.shard_numel(key)
        assert policy.reduce
        gathers = uses_of(step, layout, key.unit) if row.params.cuts else int(row.held and not row.frozen)
        add(over, "params", gathers, gather_bytes(layout, key, size), size)
        if row.frozen:
            continue
        reduced = own * policy.reduce.itemsize
        each = reduction_bytes(layout, key, size) if row.cuts else round_a_ring(reduced, size)
        add(over, "grads", times, each, size)
        add(replicas, "replicas", times, round_a_ring(reduced, copies), copies)
    sends = step.optimizer.sends
    for whole in sends(like.only(layout.trainable), init_moments(step, like)) if sends is not None else ():
        both = sent_whole(layout, ranks.place(ranks.sharded, rank), whole)
        for axis, (messages, sent) in zip((over, tensor), both, strict=True):
            if messages:
                counts[axis, "leaves"] += messages
                sizes[axis, "leaves"] += sent
    rows = [row for row in layout.rows if not row.frozen]
    cut = [row for row in rows if row.cuts]
    add(over, "norm", int(bool(cut)), round_a_ring(len(cut) * torch.float64.itemsize, size), size)
    # those of whole leaves too, which must be the same: every rank sends all to each other one
    add(tensor, "norm", int(bool(rows)), (slices - 1) * len(rows) * torch.float64.itemsize, slices)
    for axis, among in ((over, size), (replicas, copies)):
        add(axis, "loss", 1, round_a_ring(torch.float32.itemsize, among), among)
    add(tensor, "loss", 1, (slices - 1) * torch.float64.itemsize, slices)  # which must be the same too
    return [Sent(axis, purpose, count, sizes[axis, purpose]) for (axis, purpose), count in counts.items()]


def gather_bytes(layout: Layout, key: Key, ranks: int) -> int:
    """Bytes that a rank sends for a gather of a group's params."""
    policy, own = layout.groups[key].row.policy, layout.shard_numel(key)
    assert policy.compute
    return (ranks - 1) * (nbytes(Blocks(), own) if policy.gather else own * policy.compute.itemsize)


def reduction_bytes(layout: Layout, key: Key, ranks: int) -> int:
    """Bytes that a rank sends for the reduction of a group's gradients to slices."""
    return (ranks - 1) * layout.shard_numel(key) * layout.groups[key].row.policy.wire.itemsize


def round_a_ring(size: int, ranks: int) -> int:
    """Bytes that a rank sends for the sum over all of them."""
    return 2 * size * (ranks - 1) // ranks


def uses_of(step: Spec, layout: Layout, unit: str) -> int:
    """How often the params of a unit that runs once are brought to the device for it."""
    if unit == ROOT:
        return 1
    last = max((name for name in step.table(layout).acting if name != ROOT), key=in_order)
    return 1 + pullbacks(step) - (unit == last)


def pullbacks(step: Spec) -> int:
    return 2 if step.fusion and step.fused_norm == "twice" else 1


def in_order(unit: str) -> list[tuple[int, str]]:
    """Sorts units as numbers are counted: blocks.10 behind blocks.9."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", unit)]
