"""A plan in words: the cells of its table and the lines below it, the schedule of a step's graph among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from fzero.base.display import counted, in_bytes
from fzero.base.patterns import ROOT
from fzero.formats.formats import Plain
from fzero.state.sent import Sent, gather_bytes, in_order, reduction_bytes
from fzero.stores.put import DEVICE, name_of
from fzero.table.layout import Key, Layout
from fzero.table.ranks import joined
from fzero.table.rows import Kept, Row

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
    """A gather of a group's params, or the reduction of their gradients.

    Attributes:
        nbytes: that this rank sends to all others.
    """

    what: str  # "gather" or "reduce"
    key: Key
    nbytes: int


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
