"""What several ranks hold alike, of which each saves a part: it is one value only if their checksums are the same."""

from __future__ import annotations

import collections
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from fzero.checkpoint.contents import Run, runs, share
from fzero.checkpoint.everyone import Everyone
from fzero.checkpoint.staging import bytes_of, on_host
from fzero.comm.axis import Axis
from fzero.formats.formats import CHUNK, Format
from fzero.state.sharded import Sharded
from fzero.state.sliced import sliced_in
from fzero.stores.away import tensor_of
from fzero.table.layout import Key, Layout

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD, _OTHER = 0x9E3779B97F4A7C15 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


class Copies(NamedTuple):
    """The checksums of what a rank holds as some others must.

    Attributes:
        sums: what it is -> its checksum, the same on all ranks that have one.
        totals: of leaves that are not cut, of which the ranks of the tensor axis hold copies: what it is -> the sum
            over this rank's part of it; those of all ranks that share one copy add up to the same for each copy.
    """

    sums: dict[str, str]
    totals: dict[str, int]

    @staticmethod
    def of(trees: Mapping[str, Sharded]) -> Copies:
        """Those of some trees, by their names."""
        sums, totals = dict[str, str](), dict[str, int]()
        for name, tree in trees.items():
            sums |= whole_sums(tree, name)
            for key in tree.groups:
                placed, size, (base, low, high) = tree.placed(key), held(tree, key), share(tree, key)
                for part, found in runs(tree.layout, key, placed.format, base, base + size) if size else ():
                    sums |= sum_of(tree.layout, found, part, name, tensor_of(placed.parts[part]).detach())
                for part, found in (
                    runs(tree.layout, key, placed.format, low, high) if _copied(tree.layout, key) else ()
                ):
                    own = tensor_of(placed.parts[part]).detach()[(low - base) // placed.format.parts[part].every :]
                    totals |= totals_of(tree.layout, found, placed.format, part, name, own)
        return Copies(sums, totals)


def _copied(layout: Layout, key: Key) -> bool:
    """Tells whether ranks of the tensor axis hold copies of leaves of a group."""
    return layout.tensor[1] > 1 and any(layout.rows[slot.leaf].slices is None for slot in layout.groups[key].slots)


def _is_whole(tree: Sharded, key: Key) -> bool:
    """Tells whether every rank holds a group in full and nowhere else, as params in ZeRO-1 and 2."""
    return key in tree.held_entries and key not in tree.entries and tree.axis_of(key).size > 1


def held(tree: Sharded, key: Key) -> int:
    """The elements of this rank's slice of a group that other ranks hold, too; 0 where none does, or all in full."""
    axis = tree.axis_of(key)
    return tree.layout.shard_numel(key) if axis.ranks > axis.size and not _is_whole(tree, key) else 0


def sum_of(layout: Layout, found: Sequence[Run], part: int, name: str, buffer: torch.Tensor) -> dict[str, str]:
    """The CRC-32 of the leaves in one part of a buffer, not of what lies between them; nothing where there are none."""
    if not found:
        return {}
    total = 0
    for run in found:
        total = zlib.crc32(bytes_of(on_host(buffer[run.low : run.high])), total)
    more = (f" from element {found[0].start} on" if found[0].start else "") + (f", part {part}" if part else "")
    slices = f" in slice {layout.tensor[0]}" if layout.tensor[1] > 1 else ""
    return {f"{name} of leaf {layout.rows[found[0].leaf].path!r} and what is with it{slices}{more}": f"{total:08x}"}


def whole_sums(tree: Sharded, name: str) -> dict[str, str]:
    """The checksums of groups that every rank holds in full."""
    out = dict[str, str]()
    for key, full in tree.held_entries.items():
        if _is_whole(tree, key):
            for part, found in runs(tree.layout, key, tree.format(key), 0, tree.layout.groups[key].numel):
                out |= sum_of(tree.layout, found, part, name, tensor_of(full).detach())
    return out


def totals_of(
    layout: Layout, found: Sequence[Run], form: Format, part: int, name: str, buffer: torch.Tensor
) -> dict[str, int]:
    """The checksum of each leaf that is not cut: a sum over its entries of what each of them and its place make."""
    out = dict[str, int]()
    for run in found if layout.tensor[1] > 1 else ():
        if sliced_in(layout, run.leaf) is not None:
            continue
        own, total = on_host(buffer[run.low : run.high]), 0
        own, first = own.view(_INTEGERS[own.itemsize]), run.start // form.parts[part].every
        for start in range(0, own.numel(), CHUNK):
            bits = own[start : start + CHUNK].to(torch.int64)
            bits = bits + torch.arange(first + start, first + start + bits.numel(), device="cpu") * _ODD
            bits ^= bits >> 29
            total += int((bits * _OTHER).bitwise_xor_(bits >> 32).sum())
        out[f"{name} of leaf {layout.rows[run.leaf].path!r}" + (f", part {part}" if part else "")] = total % (1 << 64)
    return out


def difference(heard: Sequence[Copies], ranks: int) -> str:
    """How the checksums of two ranks differ, by their numbers; "" where none do.

    Args:
        ranks: how many of them share one copy of what is not cut over the tensor axis.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, (sums, _) in enumerate(heard):
        for name, own in sums.items():
            other, theirs = first.setdefault(name, (rank, own))
            if own != theirs:
                return _differ(name, f"rank {other}", theirs, f"rank {rank}", own)
    totals = [collections.Counter[str]() for _ in range(0, len(heard), ranks)]
    for rank, own in enumerate(heard):
        totals[rank // ranks].update(own.totals)
    for number, own in enumerate(totals[1:], 1):
        for name, total in own.items():
            words = [f"{each % (1 << 64):016x}" for each in (totals[0][name], total)]
            if words[0] != words[1]:
                return _differ(name, _named(0, ranks), words[0], _named(number, ranks), words[1])
    return ""


def _named(number: int, ranks: int) -> str:
    """The ranks that share a copy."""
    first = number * ranks
    return f"ranks {first} to {first + ranks - 1}" if ranks > 1 else f"rank {first}"


def _differ(name: str, rank: str, own: str, other: str, theirs: str) -> str:
    return (
        f"the ranks hold different values of {name}: {rank} those with checksum {own}, {other} those with {theirs}; "
        "expected the same, as they are copies. Give every rank the same state, or begin anew from one rank's, with "
        "step.init(params, sync=True)."
    )


def need_same(axis: Axis, own: Copies, who: str) -> None:
    """Raises ValueError on every rank where copies differ."""
    everyone = Everyone(axis)
    if everyone.count > 1:
        heard = [Copies(*json.loads(text)) for text in everyone.exchange(json.dumps(own), who)]
        if said := difference(heard, axis.ranks):
            raise ValueError(f"fz.{who}: {said}")
