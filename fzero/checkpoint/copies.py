"""What several ranks hold alike, of which each saves a part: it is one value only if their checksums are the same."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from fzero.checkpoint.contents import runs
from fzero.checkpoint.staging import bytes_of, on_host
from fzero.comm.axis import Axis
from fzero.formats.formats import Format
from fzero.state.sharded import Sharded
from fzero.stores.away import tensor_of
from fzero.table.layout import Key, Layout

Sums = dict[str, str]  # what a rank holds -> its checksum


class Slice(Protocol):
    """A rank's buffer of one group, which begins at element `base` of it and has `size`."""

    @property
    def key(self) -> Key: ...
    @property
    def form(self) -> Format: ...
    @property
    def base(self) -> int: ...
    @property
    def size(self) -> int: ...


def held(tree: Sharded, key: Key) -> int:
    """The elements of this rank's buffer of a group that other ranks hold, too; 0 where it is the only one."""
    axis = tree.axis_of(key)
    return tree.layout.shard_numel(key) if axis.ranks > axis.size else 0


def sum_of(layout: Layout, own: Slice, name: str, part: int, buffer: torch.Tensor) -> Sums:
    """The CRC-32 of the leaves in one part of a buffer, not of what lies between them; nothing where there are none."""
    found = dict(runs(layout, own.key, own.form, own.base, own.base + own.size))[part]
    if not found:
        return {}
    total = 0
    for run in found:
        total = zlib.crc32(bytes_of(on_host(buffer[run.low : run.high])), total)
    more = (f" from element {own.base} on" if own.base else "") + (f", part {part}" if part else "")
    return {f"{name} of leaf {layout.rows[found[0].leaf].path!r} and what is with it{more}": f"{total:08x}"}


class _Slice(NamedTuple):
    key: Key
    form: Format
    base: int
    size: int


def sums_of(tree: Sharded, name: str) -> Sums:
    """The checksums of those groups of a tree that other ranks hold, too."""
    out: Sums = {}
    for key in tree.groups:
        if size := held(tree, key):
            placed = tree.placed(key)
            own = _Slice(key, placed.format, tree.rank_of(key) * size, size)
            for part, buffer in enumerate(placed.parts):
                out |= sum_of(tree.layout, own, name, part, tensor_of(buffer).detach())
    return out


def difference(heard: Sequence[Mapping[str, str]]) -> str:
    """How two ranks' checksums differ, by data rank; "" where none do."""
    first: dict[str, tuple[int, str]] = {}
    for rank, sums in enumerate(heard):
        for name, own in sums.items():
            other, theirs = first.setdefault(name, (rank, own))
            if own != theirs:
                return (
                    f"the ranks hold different values of {name}: rank {other} those with CRC-32 {theirs}, rank {rank} "
                    f"those with {own}; expected the same, as they are copies. Give every rank the same state, or "
                    "begin anew from one rank's, with step.init(params, sync=True)."
                )
    return ""


def need_same(axis: Axis, sums: Sums, who: str) -> None:
    """Raises ValueError on every rank where copies differ."""
    if axis.ranks > 1 and (said := difference([json.loads(text) for text in axis.exchange(json.dumps(sums), who)])):
        raise ValueError(f"fz.{who}: {said}")
