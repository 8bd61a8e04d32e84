"""Which leaf lies where: leaves <-> flat buffers, one buffer for each group of like leaves of a unit."""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from fzero.base import pages, private, pytree
from fzero.formats.formats import ALIGN, Format
from fzero.table.rows import Row, Rule, Table

_TOGETHER = 1 << 20  # elements of all groups that share a node
SMALL = 1 << 16  # elements, up to which one operation on all of a buffer costs less than some on parts


def _aligned(numel: int, step: int = ALIGN) -> int:
    return -(-numel // step) * step


class Key(NamedTuple):
    """The identity of a group: its unit, and which of the unit's groups it is."""

    unit: str
    number: int

    def __str__(self) -> str:
        name = f"unit {self.unit or '(root)'!r}"
        return f"{name}, buffer {self.number}" if self.number else name


@dataclass(frozen=True)
class Slot:
    """The place of one leaf, or of this rank's slice of it, in its group's buffer, in elements."""

    leaf: int
    path: str
    offset: int
    numel: int
    shape: tuple[int, ...]


class Order(NamedTuple):
    """What the buffers of some groups consist of, one after the other.

    Attributes:
        parts: the place of a leaf and 0, or -1 and the size of a gap.
        gaps: these sizes.
    """

    parts: tuple[tuple[int, int], ...]
    gaps: frozenset[int]

    @staticmethod
    def of(groups: Iterable[Group]) -> Order:
        parts, place = list[tuple[int, int]](), 0
        for group in groups:
            for gap in group.split_sizes[:-1:2]:
                parts += [(-1, gap), (place, 0)] if gap else [(place, 0)]
                place += 1
            parts += [(-1, group.split_sizes[-1])] if group.split_sizes[-1] else []
        return Order(tuple(parts), frozenset(gap for _, gap in parts if gap))

    def packed(self, leaves: Sequence[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor | None:
        """A new buffer of the leaves, gaps are zero; None where not all leaves are there, dense and of a dtype."""
        for x in leaves:
            if x is None or x.dtype != dtype or x.layout != torch.strided:
                return None
        assert leaves[0] is not None
        zeros, parts = dict(zip(self.gaps, map(leaves[0].new_zeros, self.gaps), strict=True)), list[object]()
        for place, gap in self.parts:
            parts.append(zeros[gap] if gap else leaves[place])
        return private.flattened(parts)


@dataclass(frozen=True)
class Group:
    """The like leaves of one unit, which share their buffers. Rank r owns elements [r, r + 1) * numel / shards."""

    key: Key
    numel: int
    shards: int
    slots: tuple[Slot, ...]
    row: Row  # the first leaf's; all but its path, shape and own dtype holds for all

    @cached_property
    def unit(self) -> str:
        return self.key.unit

    def leaf_at(self, offset: int) -> str:
        """The path of the leaf at an offset of the full buffer."""
        return next((slot.path for slot in reversed(self.slots) if slot.offset <= offset), self.slots[0].path)

    @cached_property
    def split_sizes(self) -> tuple[int, ...]:
        """Sizes that cut the buffer into leaf, gap, leaf, gap, ... and the rest."""
        sizes, end = [], 0
        for slot in self.slots:
            sizes += [slot.offset - end, slot.numel]
            end = slot.offset + slot.numel
        return (*sizes, self.numel - end)

    @cached_property
    def _places(self) -> tuple[tuple[int, tuple[int, ...], tuple[int, ...], int], ...]:
        """Leaf index, shape, strides and offset of every leaf."""
        strides = [tuple(math.prod(slot.shape[i + 1 :]) for i in range(len(slot.shape))) for slot in self.slots]
        return tuple((slot.leaf, slot.shape, own, slot.offset) for slot, own in zip(self.slots, strides, strict=True))

    @cached_property
    def _gaps(self) -> tuple[tuple[int, int], ...]:
        """Offset and size of what lies between leaves."""
        ends = [0, *[slot.offset + slot.numel for slot in self.slots]]
        return tuple((end, size) for end, size in zip(ends, self.split_sizes[::2], strict=True) if size)

    @cached_property
    def _order(self) -> Order:
        return Order.of((self,))

    def cut(self, full: torch.Tensor) -> dict[int, torch.Tensor]:
        """Leaf index -> its view of a full buffer that nothing differentiates."""
        base, views = full.storage_offset(), dict[int, torch.Tensor]()
        for leaf, shape, strides, offset in self._places:
            views[leaf] = full.as_strided(shape, strides, base + offset)
        return views

    def full_of(self, leaves: Sequence[torch.Tensor | None], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A new full buffer of the leaves, which nothing differentiates; `None` and gaps are zero."""
        full = None
        if self.numel < SMALL and len(self._order.parts) > 1:  # of one it would be a view
            full = self._order.packed(leaves, dtype)
        return self.join_into(pages.empty(self.numel, dtype, device), leaves) if full is None else full

    def join_into(self, full: torch.Tensor, leaves: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Copies the leaves into a full buffer, `None` and gaps are zero: the one copy into a flat buffer."""
        parts = list(self.cut(full).values())
        if self.numel < SMALL:  # filling all of it costs less than finding the gaps
            full.zero_()
        else:
            missing = [part for part, x in zip(parts, leaves, strict=True) if x is None]
            for part in (*[full.narrow(0, *gap) for gap in self._gaps], *missing):
                part.zero_()
        targets, given = [], []
        for part, leaf in zip(parts, leaves, strict=True):
            if leaf is not None:
                targets.append(part)
                given.append(leaf if leaf.layout == torch.strided else leaf.to_dense())
        if targets:
            torch._foreach_copy_(targets, given)
        return full

    def add_into(self, total: torch.Tensor, leaves: Sequence[torch.Tensor | None]) -> None:
        """Adds the leaves to a full buffer, without one between."""
        parts = self.cut(total).values()
        pairs = [(part, _dense(leaf)) for part, leaf in zip(parts, leaves, strict=True) if leaf is not None]
        if pairs:
            torch._foreach_add_([part for part, _ in pairs], [leaf for _, leaf in pairs])

    def joined(self, leaves: Sequence[torch.Tensor | None], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A full buffer as a differentiable function of the leaves; `None` and gaps are zero."""
        parts = [torch.zeros(size, dtype=dtype, device=device) for size in self.split_sizes]
        for place, leaf in enumerate(leaves):
            if leaf is not None:
                parts[2 * place + 1] = _dense(leaf).reshape(-1)
        return torch.cat(parts)

    def views(self, full: torch.Tensor) -> dict[int, torch.Tensor]:
        """Leaf index -> its view of a full buffer; differentiable, by one split (slices would pad each gradient)."""
        parts = full.split_with_sizes(list(self.split_sizes))
        return {slot.leaf: parts[2 * i + 1].view(slot.shape) for i, slot in enumerate(self.slots)}


@dataclass(frozen=True)
class Layout:
    """Which leaf lies where: the groups of a tree of params, and each leaf's place in its group's flat buffer.

    A group is the leaves of one unit whose rows in the table are alike. `state.layout` has the layout of a state.

    Attributes:
        rows: the row of each leaf, in the order of leaves.
        shards: the number of ranks of the axis that buffers are cut over.
        groups: `{key: group}`. A group has its leaves as slots: path, offset, number of elements and shape.
        tensor: this rank's number on the tensor axis (`fz.shard_tensor`), and the number of ranks there.
    """

    rows: tuple[Row, ...]
    shards: int
    groups: Mapping[Key, Group]
    tensor: tuple[int, int] = (0, 1)
    # as far as asked for: (kind of state, group key) -> its format and its buffers' names
    formats: dict[tuple[str, Key], tuple[Format, tuple[object, ...]]] = field(default_factory=dict, repr=False)
    # kind of state -> its buffers' names -> as `Sharded.sizes`
    sizes: dict[str, dict[object, tuple[int, bool]]] = field(default_factory=dict, repr=False)
    # as far as asked for: rules -> the table that they make of these leaves, as steps may share a state
    tables: dict[tuple[Rule, ...], Table] = field(default_factory=dict, repr=False)
    # as far as asked for: name of an optimizer -> leaf -> the rank that has it whole in an update
    owners: dict[str, dict[int, int]] = field(default_factory=dict, repr=False)
    # updates of the optimizers that ranks have compared, the last ones
    compared: deque[object] = field(default_factory=functools.partial(deque, maxlen=8), repr=False)
    # as far as asked for: a group and what its leaves' counts differ by -> as `state.counts.spans`
    spans: dict[object, Sequence[tuple[int, int, int]]] = field(default_factory=dict, repr=False)
    # as far as asked for: groups and this rank's number in each -> as `state.squares._places`
    places: dict[object, tuple[np.ndarray, np.ndarray, int]] = field(default_factory=dict, repr=False)
    _sizes: dict[tuple[Key, int], list[int]] = field(default_factory=dict, repr=False)
    _orders: dict[tuple[Key, ...], Order] = field(default_factory=dict, repr=False)

    def __reduce__(self) -> tuple[object, ...]:
        return Layout, (self.rows, self.shards, self.groups, self.tensor)  # not the tables, which know steps

    @cached_property
    def _hash(self) -> int:
        return hash((self.rows, self.shards, self.tensor))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout):
            return False
        return (self.shards, self.tensor, self.rows) == (other.shards, other.tensor, other.rows)

    @staticmethod
    def build(rows: Sequence[Row], shards: int, tensor: tuple[int, int] = (0, 1)) -> Layout:
        """Packs leaves in their order. Leaves and shards start on multiples of 64 elements.

        Args:
            rows: the row of each leaf.
            shards: the number of ranks to cut over.
            tensor: this rank's number on the tensor axis, and the number of ranks there.
        """
        members: dict[tuple[str, tuple[object, ...]], list[int]] = {}
        for index, row in enumerate(rows):
            members.setdefault((row.unit, row.group), []).append(index)
        groups: dict[Key, Group] = {}
        for (unit, _), indices in members.items():
            key, first = Key(unit, sum(key.unit == unit for key in groups)), rows[indices[0]]
            own, slots, end = shards if first.cuts else 1, [], 0
            for index in indices:
                row = rows[index]
                shape = row.shape if row.slices is None else row.slices.shape(row.shape, *tensor)
                slots.append(Slot(index, row.path, end, math.prod(shape), shape))
                end = _aligned(end + slots[-1].numel)
            # a buffer is never empty, also where this rank has no piece of its leaves
            groups[key] = Group(key, _aligned(max(end, 1), ALIGN * own), own, tuple(slots), first)
        return Layout(tuple(rows), shards, groups, tensor)

    @cached_property
    def key_of(self) -> dict[str, tuple[Key, Slot]]:
        """The key of its group and its slot, for each leaf path."""
        return {slot.path: (key, slot) for key, group in self.groups.items() for slot in group.slots}

    @cached_property
    def trainable(self) -> tuple[Key, ...]:
        """The keys of the groups that are differentiated and updated."""
        return tuple(key for key, group in self.groups.items() if not group.row.frozen)

    def together(self, keys: Iterable[Key]) -> dict[Key, None]:
        """Those of some groups that share a node of autograd, in order, as a node costs more than they do.

        Their cotangents wait for each other.
        """
        room, out = _TOGETHER, dict[Key, None]()
        for key in keys:
            if (numel := self.groups[key].numel) < SMALL and numel <= room:
                out[key], room = None, room - numel
        return out

    def packed(
        self, keys: tuple[Key, ...], leaves: Sequence[torch.Tensor | None], dtype: torch.dtype
    ) -> Sequence[torch.Tensor]:
        """The full buffers of some groups, as parts of a new one; none where `Order.packed` gives none."""
        order = self._orders.get(keys)
        if order is None:
            order = self._orders[keys] = Order.of([self.groups[key] for key in keys])
        full = order.packed(leaves, dtype)
        return () if full is None else full.split([self.groups[key].numel for key in keys])

    def in_parts(self, keys: Iterable[Key]) -> list[tuple[Key, ...]]:
        """Some groups in the parts that are updated at once: large ones by themselves, small ones together."""
        return list(map(tuple, pytree.batches(keys, self.shard_numel, SMALL)))

    @cached_property
    def keeping(self) -> tuple[Key, ...]:
        """The keys of the frozen groups that keep their moments."""
        return tuple(key for key, group in self.groups.items() if group.row.frozen and group.row.moments)

    @cached_property
    def shard_total(self) -> int:
        """The elements of all that is updated, on one rank."""
        return sum(map(self.shard_numel, self.trainable))

    def shard_numel(self, key: Key) -> int:
        return self.groups[key].numel // self.groups[key].shards

    def pieces(self, key: Key, rank: int) -> list[tuple[Slot, int, int]]:
        """For each leaf of a group its range [start, stop) in the shard of `rank`, empty if none of it is there."""
        size = self.shard_numel(key)
        starts = [(slot, slot.offset - rank * size) for slot in self.groups[key].slots]
        return [(slot, min(max(at, 0), size), min(max(at + slot.numel, 0), size)) for slot, at in starts]

    def cut(self, key: Key, rank: int, shard: torch.Tensor) -> Sequence[torch.Tensor]:
        """The piece of each leaf of a group, from the shard of `rank`."""
        return shard.split_with_sizes(self._sizes_of(key, rank))[1::2]

    def gaps(self, key: Key, rank: int, shard: torch.Tensor) -> Sequence[torch.Tensor]:
        """What lies between the leaves in a shard."""
        sizes = self._sizes_of(key, rank)
        return shard.split_with_sizes(sizes)[::2] if any(sizes[::2]) else ()

    def _sizes_of(self, key: Key, rank: int) -> list[int]:
        """Sizes that cut a rank's shard into gap, piece, gap, piece, ... and the rest."""
        sizes = self._sizes.get((key, rank))
        if sizes is None:
            bounds = [bound for _, *piece in self.pieces(key, rank) for bound in piece]
            bounds = [0, *bounds, self.shard_numel(key)]
            sizes = self._sizes[key, rank] = [b - a for a, b in itertools.pairwise(bounds)]
        return sizes


def _dense(grad: torch.Tensor) -> torch.Tensor:
    """torch.nn.Embedding(sparse=True) has sparse ones."""
    return grad if grad.layout == torch.strided else grad.to_dense()
