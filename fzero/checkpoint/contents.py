"""What a checkpoint keeps of a tree: containers, formats, slices of leaves; of copies one, if their checksums agree."""

from __future__ import annotations

import collections
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fzero.base import pytree
from fzero.checkpoint.chunks import on_host
from fzero.checkpoint.fill import Everyone
from fzero.checkpoint.manifest import DTYPES
from fzero.comm.axis import Axis
from fzero.formats.formats import ALIGN, Blocks, Companded, Corrected, Exact, Format, Plain, entries
from fzero.state.sharded import Sharded
from fzero.state.sliced import sliced_in
from fzero.stores.away import tensor_of
from fzero.table.layout import Key, Layout
from fzero.table.module_params import ModuleParams
from fzero.table.slices import Use


class Run(NamedTuple):
    """Consecutive elements of a leaf, or of this rank's slice of it, in one part of its format."""

    leaf: int  # its index
    # start, stop: in elements of the leaf or the slice, row by row; start is a multiple of 64
    start: int
    stop: int
    # low, high: in entries of the part, from where the range begins
    low: int
    high: int


def runs(layout: Layout, key: Key, form: Format, low: int, high: int) -> Iterator[tuple[int, list[Run]]]:
    """What the range [low, high) of the full buffer of a group holds, by the number of the format's part."""
    for number, part in enumerate(form.parts):
        found = []
        for slot in layout.groups[key].slots:
            start, stop = max(low, slot.offset), min(high, slot.offset + slot.numel)
            if start < stop:
                at, count = (start - low) // part.every, entries(form, part, stop - start)
                found.append(Run(slot.leaf, start - slot.offset, stop - slot.offset, at, at + count))
        yield number, found


def share(tree: Sharded, key: Key) -> tuple[int, int, int]:
    """Where this rank's buffer of a group begins, and the range that it saves: ranks with the same one divide it."""
    size, axis = tree.layout.shard_numel(key), tree.axis_of(key)
    copies, number = axis.ranks // axis.size, axis.data_rank // axis.size
    base, blocks = tree.rank_of(key) * size, size // ALIGN
    return base, base + blocks * number // copies * ALIGN, base + blocks * (number + 1) // copies * ALIGN


def format_named(name: str, kind: str) -> Format | None:
    """The format of a kind of tree by its name; None where this version knows none."""
    known = [
        *[Plain(dtype, rounds) for dtype in DTYPES.values() for rounds in (False, True)],
        *[Companded(kind == "signed", width) for width in (8, 4)],
        *(Exact(), Corrected(), Blocks()),
    ]
    return next((form for form in known if str(form) == name), None)


_KEYS = (str, int, bool, type(None))


class Unnamed(ValueError):
    """A container that JSON cannot name."""


def described(structure: pytree.Spec) -> object:
    """A structure as JSON, whose leaves are their numbers; a container of another kind is named for the error."""
    return _described(pytree.unflatten(structure, range(structure.num_leaves)))


def _described(node: Any) -> Any:
    kind = type(node)
    if kind is int:
        return node
    if kind in (dict, OrderedDict, ModuleParams) and all(type(key) in _KEYS for key in node):
        said = {"frozen": list(node.frozen), "hints": list(node.hints)} if kind is ModuleParams else {}
        return {"kind": kind.__name__, "keys": list(node), "items": [_described(x) for x in node.values()], **said}
    if kind in (list, tuple):
        return {"kind": kind.__name__, "items": [_described(x) for x in node]}
    return {"kind": f"{kind.__module__}.{kind.__qualname__}"}


def built(description: object) -> pytree.Spec:
    """The structure again."""
    return pytree.flatten(_built(description))[1]


def _built(node: Any) -> Any:
    if isinstance(node, int):
        return 0
    kind, items = node["kind"], [_built(x) for x in node.get("items", ())]
    if kind in ("list", "tuple"):
        return items if kind == "list" else tuple(items)
    if kind not in ("dict", "OrderedDict", "ModuleParams"):
        raise Unnamed(kind)
    pairs = list(zip(node["keys"], items, strict=True))
    if kind == "ModuleParams":
        hints = {name: tuple(Use(*use) for use in hint) for name, hint in node.get("hints", ())}
        return ModuleParams(pairs, frozen=node["frozen"], hints=hints)
    return OrderedDict(pairs) if kind == "OrderedDict" else dict(pairs)


# what there are copies of -> the ranks that hold one together -> the sum over this rank's part of it
Copies = dict[str, dict[str, int]]
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 15  # entries that are summed at once
_ODD, _OTHER = 0x9E3779B97F4A7C15, np.uint64(0x94D049BB133111EB)
_PLACES = np.arange(_CHUNK, dtype=np.uint64) * np.uint64(_ODD)


def copies_of(trees: Mapping[str, Sharded]) -> Copies:
    """The checksums of what other ranks hold, too, of some trees by their names."""
    out = Copies()
    for name, tree in trees.items():
        for key in tree.groups:
            _add(out, name, tree, key)
    return out


def _add(out: Copies, name: str, tree: Sharded, key: Key) -> None:
    layout, axis, size, me = tree.layout, tree.axis_of(key), tree.layout.shard_numel(key), Everyone(tree.axis).number
    # each rank may hold a group in full and nowhere else, as params in ZeRO-1 and 2
    full = tree.held_entries.get(key) if key not in tree.entries and axis.size > 1 else None
    together = axis.size if full is None else 1  # ranks that hold a copy
    first = me // together * together
    ranks = f"ranks {first} to {first + together - 1}" if together > 1 else f"rank {first}"
    cut = {slot.leaf for slot in layout.groups[key].slots if sliced_in(layout, slot.leaf) is not None}
    leaves = {slot.leaf for slot in layout.groups[key].slots if axis.ranks > together or slot.leaf not in cut}
    if not leaves or (axis.ranks == together and layout.tensor[1] == 1):
        return
    placed, low = tree.placed(key), 0 if full is not None else tree.rank_of(key) * size
    high = low + size if full is None else layout.groups[key].numel
    for part, found in runs(layout, key, placed.format, low, high):
        buffer = tensor_of(placed.parts[part] if full is None else full).detach()
        for run in [run for run in found if run.leaf in leaves]:
            what = f"{name} of leaf {layout.rows[run.leaf].path!r}" + (f", part {part}" if part else "")
            what += f", slice {layout.tensor[0]}" if run.leaf in cut else ""
            total = _total(buffer[run.low : run.high], run.start // placed.format.parts[part].every)
            out.setdefault(what, {})[ranks] = total


def _total(own: torch.Tensor, place: int) -> int:
    """The sum of what the bits of some entries make with their places, from this one on."""
    words, total = on_host(own).view(_INTEGERS[own.itemsize]).numpy().view(f"u{own.itemsize}"), 0
    for at in range(0, len(words), _CHUNK):
        some = words[at : at + _CHUNK]
        mixed = some + _PLACES[: len(some)]
        mixed += np.uint64((place + at) * _ODD % (1 << 64))
        mixed ^= mixed >> np.uint64(29)  # or the top bits of two words would cancel
        mixed *= _OTHER
        mixed ^= mixed >> np.uint64(32)
        total += int(mixed.sum())
    return total % (1 << 64)


def difference(heard: Sequence[Copies]) -> str:
    """How the copies of ranks differ, by their numbers; "" if all agree."""
    sums = collections.defaultdict[str, collections.Counter[str]](collections.Counter)
    for own in heard:
        for what, totals in own.items():
            sums[what].update(totals)
    for what, totals in sums.items():
        words = {ranks: f"{total % (1 << 64):016x}" for ranks, total in totals.items()}
        first, *others = words
        for other in others:
            if words[other] != words[first]:
                return (
                    f"the ranks hold different values of {what}: {first} those with checksum {words[first]}, {other} "
                    f"those with {words[other]}; expected the same, as they are copies. Give every rank the same "
                    "state, or begin anew from one rank's, with step.init(params, sync=True)."
                )
    return ""


def need_same(axis: Axis, own: Copies, who: str) -> None:
    """Raises ValueError on every rank where copies differ."""
    everyone = Everyone(axis)
    if everyone.count > 1:
        if said := difference([json.loads(text) for text in everyone.exchange(json.dumps(own), who)]):
            raise ValueError(f"fz.{who}: {said}")
