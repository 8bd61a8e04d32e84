"""A plan in words: the cells of its table and the lines below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fzero.base.display import counted, in_bytes
from fzero.formats.formats import Plain
from fzero.state.sent import Sent
from fzero.stores.put import DEVICE, name_of
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
