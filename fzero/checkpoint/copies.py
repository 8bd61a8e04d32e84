"""What several ranks hold alike, of which each saves a part: it is one value only if their checksums are the same."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence

import torch

from fzero.checkpoint.contents import Run, runs
from fzero.checkpoint.staging import bytes_of, on_host
from fzero.comm.axis import Axis
from fzero.state.sharded import Sharded
from fzero.stores.away import tensor_of
from fzero.table.layout import Key, Layout

Sums = dict[str, str]  # what a rank holds -> its checksum


def _is_whole(tree: Sharded, key: Key) -> bool:
    """Tells whether every rank holds a group in full and nowhere else, as params in ZeRO-1 and 2."""
    return key in tree.held_entries and key not in tree.entries and tree.axis_of(key).size > 1


def held(tree: Sharded, key: Key) -> int:
    """The elements of this rank's slice of a group that other ranks hold, too; 0 where none does, or all in full."""
    axis = tree.axis_of(key)
    return tree.layout.shard_numel(key) if axis.ranks > axis.size and not _is_whole(tree, key) else 0


def sum_of(layout: Layout, found: Sequence[Run], part: int, name: str, buffer: torch.Tensor) -> Sums:
    """The CRC-32 of the leaves in one part of a buffer, not of what lies between them; nothing where there are none."""
    if not found:
        return {}
    total = 0
    for run in found:
        total = zlib.crc32(bytes_of(on_host(buffer[run.low : run.high])), total)
    more = (f" from element {found[0].start} on" if found[0].start else "") + (f", part {part}" if part else "")
    return {f"{name} of leaf {layout.rows[found[0].leaf].path!r} and what is with it{more}": f"{total:08x}"}


def whole_sums(tree: Sharded, name: str) -> Sums:
    """The checksums of groups that every rank holds in full."""
    out: Sums = {}
    for key, full in tree.held_entries.items():
        if _is_whole(tree, key):
            for part, found in runs(tree.layout, key, tree.format(key), 0, tree.layout.groups[key].numel):
                out |= sum_of(tree.layout, found, part, name, tensor_of(full).detach())
    return out


def sums_of(tree: Sharded, name: str) -> Sums:
    """The checksums of those groups of a tree that other ranks hold, too."""
    out: Sums = whole_sums(tree, name)
    for key in tree.groups:
        if size := held(tree, key):
            placed, base = tree.placed(key), tree.rank_of(key) * size
            for part, found in runs(tree.layout, key, placed.format, base, base + size):
                out |= sum_of(tree.layout, found, part, name, tensor_of(placed.parts[part]).detach())
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
