"""The schedule of a step's graph (`fz.jit`): what is on its way between ranks while which unit computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fzero.base.display import in_bytes
from fzero.base.patterns import ROOT
from fzero.state.sent import gather_bytes, in_order, reduction_bytes
from fzero.table.layout import Key, Layout


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
