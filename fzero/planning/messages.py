"""A plan in words, and what it says that the ranks of a step send each other, and for what."""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from fzero.base.display import counted, in_bytes
from fzero.base.patterns import ROOT
from fzero.formats.formats import Blocks, Plain, nbytes
from fzero.stores.memories import DEVICE, name_of
from fzero.table.layout import Key, Layout
from fzero.table.ranks import Ranks, joined
from fzero.table.rows import Kept, Row
from fzero.table.spec import Spec

OF_PARAMS = ("params", "grads", "replicas", "leaves")  # what is sent for the sake of params


class Sent(NamedTuple):
    """What a rank sends over one axis for one purpose.

    Attributes:
        axis: a mesh axis, or several that are taken as one, `dp×sp`.
        purpose: "params" (gathers), "grads" (reductions), "replicas" (their means of grads), "leaves" (whole ones,
            to the rank that updates each, and what it makes of them back), "leaf norms" (that are asked for),
            "agreement" (that `fz.whole` has failed on no rank: words, without bytes here), "norm", "loss" or
            "function" (its own maps).
        messages: collectives that it takes part in.
        nbytes: that it sends in them; of a sum over n ranks as many as go round a ring, 2 (n - 1) / n of its size.
    """

    axis: str
    purpose: str
    messages: int
    nbytes: int


def sent_of(step: Spec, layout: Layout, ranks: Ranks) -> list[Sent]:
    """What a rank sends in a step of one microbatch, whose units run once, but for what the optimizer does."""
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


HEAD = ("leaf", "shape", "unit", "params", "grads", "moments", "compute", "reduce", "gathered for", "optimizer")


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table: its head, a rule, and its rows."""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in [head, ["-" * w for w in widths], *body]]


def cells(row: Row) -> tuple[str, ...]:
    policy, whole = row.policy, " (full)" if row.held else ""
    assert policy.compute and policy.reduce
    notes = [word for word, said in (("remat", row.remat), ("compiled", row.compile)) if said and row.unit]
    notes += [row.names.words] if row.names.words and row.unit else []
    return (
        row.path,
        "×".join(map(str, row.shape)) or "scalar",
        row.unit or "(root)",
        _kept(row.params) + whole,
        _kept(row.grads),
        _kept(row.moments),
        str(Plain(policy.compute)) + (" by 8-bit" if policy.gather else ""),
        "–" if row.frozen else str(Plain(policy.reduce)),
        row.lifetime if row.unit or row.lifetime != "one use" else "the step",
        ", ".join([row.optimizer, *notes]),
    )


def _kept(kept: Kept | None) -> str:
    """How one kind of state is stored, and the axes that it is cut over."""
    if kept is None:
        return "none"
    stored = str(Plain(kept.stored) if isinstance(kept.stored, torch.dtype) else kept.stored)
    over, memory = joined([cut.axis for cut in kept.cuts]), name_of(kept.memory)
    return ", ".join([stored, *([over] if over else []), *([memory] if kept.memory != DEVICE else [])])


def sent_as(sent: Sequence[Sent]) -> str:
    """What goes over one axis."""
    return ", ".join([f"{e.purpose} {in_bytes(e.nbytes)} in {counted(e.messages, 'message')}" for e in sent])


def by_name(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {in_bytes(size)}" for name, size in sizes.items())


class Message(NamedTuple):
    """A gather of a group's params, or the reduction of their gradients."""

    what: str  # "gather" or "reduce"
    key: Key
    nbytes: int  # that this rank sends to all others


class Turn(NamedTuple):
    """One unit's forward, or its pullback; in the end the update.

    Attributes:
        unit: its name, "(root)" for what lies outside of units, or "(update)".
        before: messages that it waits for, and which begin when it is reached.
        meanwhile: those that begin before it computes, and are on their way meanwhile.
    """

    unit: str
    pulls: bool
    before: tuple[Message, ...]
    meanwhile: tuple[Message, ...]


def turns_of(layout: Layout) -> tuple[Turn, ...]:
    """The turns of one microbatch whose units run once, in the order of their names; none where nothing is sent."""
    if layout.shards == 1:
        return ()
    units = [ROOT, *sorted({key.unit for key in layout.groups} - {ROOT}, key=in_order)]
    gathers: dict[str, list[Message]] = {unit: [] for unit in units}
    reductions: dict[str, list[Message]] = {unit: [] for unit in units}
    for key, group in layout.groups.items():
        if group.row.params.cuts:
            gathers[key.unit].append(Message("gather", key, gather_bytes(layout, key, layout.shards)))
        if group.row.cuts and not group.row.frozen:
            reductions[key.unit].append(Message("reduce", key, reduction_bytes(layout, key, layout.shards)))
    out, begun = list[Turn](), list[Message]()
    for unit, later in zip(units, [*units[1:], None], strict=True):
        before = gathers[ROOT] if unit == ROOT else []
        out.append(Turn(unit or "(root)", False, (*before,), (*(gathers[later] if later else []),)))
    for unit, later in zip(reversed(units), [*units[-2::-1], None], strict=True):
        ahead = gathers[later] if later else []  # the last unit's are there, and so are the root's
        out.append(Turn(unit or "(root)", True, (), (*begun, *ahead)))
        begun = reductions[unit]
    return (*out, Turn("(update)", False, (*begun,), ()))


def turn_lines(turns: Sequence[Turn]) -> list[str]:
    """The schedule in words, a line for each turn."""
    out = ["graph of one microbatch:"]
    for turn in turns:
        behind = f" behind {_said(turn.before)}" if turn.before else ""
        meanwhile = f", meanwhile {_said(turn.meanwhile)}" if turn.meanwhile else ""
        out.append(f"  {turn.unit}{' pulled back' if turn.pulls else ''}{behind}{meanwhile}")
    return out


def _said(messages: Sequence[Message]) -> str:
    return " and ".join([f"{each.what} {each.key.unit or '(root)'} ({in_bytes(each.nbytes)})" for each in messages])
