"""Segments of shared memory on their way: lent by the sender, used by tensors of the receiver, given back, lent again.

Who has a segment is said by its first byte, in the shared memory itself: the sender writes IN_USE before it tells the
receiver of it, the receiver FREE once the last tensor over it has died, and the sender RETIRED when it lets go of a
free one. So giving back needs neither a message nor a lock, and may happen wherever Python frees a tensor.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable

import torch

from fzero.channels import mappings
from fzero.channels.errors import BadMessage
from fzero.channels.tensors import Row, shaped

SHARED_FROM = 64 << 10  # bytes of a tensor from which on it goes through shared memory
POOL_BYTES = 2 << 30  # bytes of the segments that one side of a connection lends, lent and idle; beyond, inline
IDLE_SECONDS = 10.0  # for which a free segment is kept

FREE, IN_USE, RETIRED = 0, 1, 2


class Lent:
    """A segment with what the sender knows of it."""

    def __init__(self, number: int, mapping: mappings.Mapping) -> None:
        self.number, self.mapping, self.data = number, mapping, mapping.bytes(mapping.capacity)
        self.known = False  # to the receiver
        self.used = time.monotonic()


class Lender:
    """The sender's segments. Its owner calls it from one thread at a time."""

    def __init__(self, limit: int = POOL_BYTES) -> None:
        self.limit, self.nbytes = limit, 0
        self._by_capacity: dict[int, list[Lent]] = {}
        self._next = 0

    def lend(self, nbytes: int, may_create: bool) -> tuple[Lent, int | None] | None:
        """A segment for that many bytes, with its descriptor where it is new; None where there is none to be had."""
        capacity = size_class(nbytes)
        for fitting in sorted(size for size in self._by_capacity if capacity <= size <= 2 * capacity):
            for segment in reversed(self._by_capacity[fitting]):
                if segment.mapping.state == FREE:
                    segment.mapping.state, segment.used = IN_USE, time.monotonic()
                    return segment, None
        if not may_create:
            return None
        if self.nbytes + capacity > self.limit:
            self.trim(0.0, self.nbytes + capacity - self.limit)
            if self.nbytes + capacity > self.limit:
                return None
        try:
            mapping, descriptor = mappings.create(capacity)
        except OSError:  # no memory or no descriptors: the tensor goes another way
            return None
        mapping.state = IN_USE
        segment = Lent(self._next, mapping)
        self._next = (self._next + 1) & 0xFFFFFFFF
        self._by_capacity.setdefault(capacity, []).append(segment)
        self.nbytes += capacity
        return segment, descriptor

    def take_back(self, segment: Lent) -> None:
        """A segment that was lent for a message which was not sent."""
        if segment.known:
            segment.mapping.state = FREE
        else:
            self._forget(segment)

    def trim(self, idle: float = IDLE_SECONDS, enough: float = float("inf")) -> None:
        """Lets go of segments that were free for `idle` seconds, those first that were not used for longest."""
        before, given = time.monotonic() - idle, 0
        segments = [segment for group in self._by_capacity.values() for segment in group]
        for segment in sorted(segments, key=lambda segment: segment.used):
            if given >= enough or segment.used > before:
                return
            if segment.mapping.state == FREE:
                segment.mapping.state = RETIRED
                segment.mapping.empty()
                self._forget(segment)
                given += segment.mapping.capacity

    def _forget(self, segment: Lent) -> None:
        group = self._by_capacity[segment.mapping.capacity]
        group.remove(segment)
        if not group:
            del self._by_capacity[segment.mapping.capacity]
        self.nbytes -= segment.mapping.capacity


def size_class(nbytes: int) -> int:
    """A little more, so that tensors of about the same size share segments: eight classes from each power of two on."""
    step = max(1 << max(nbytes.bit_length() - 4, 0), mappings.PAGE)
    return -(-nbytes // step) * step


class Borrower:
    """The receiver's side of the other's segments. Its owner calls it from one thread at a time."""

    def __init__(self) -> None:
        self._mapped: dict[int, _Mapped] = {}

    def adopt(self, number: int, descriptor: int) -> None:
        """Maps a new segment."""
        if number in self._mapped:
            raise BadMessage(f"segment {number} comes a second time")
        self._mapped[number] = _Mapped(mappings.adopt(descriptor))

    def tensor(self, row: Row) -> torch.Tensor:
        """The tensor that lies in a segment, which is given back when nothing uses its storage any more."""
        segment = self._mapped.get(row.segment)
        if segment is None or row.nbytes > segment.mapping.capacity or not row.nbytes:
            raise BadMessage(f"a tensor of {row.nbytes} bytes in segment {row.segment}, which does not hold it")
        if segment.user() is not None:
            raise BadMessage(f"segment {row.segment} comes again while tensors still lie in it")
        return shaped(segment.lend(row.nbytes), row)

    def trim(self) -> None:
        """Lets go of what the sender has."""
        for number in [number for number, one in self._mapped.items() if one.mapping.state == RETIRED]:
            del self._mapped[number]


class _Mapped:
    """A segment with who uses it."""

    def __init__(self, mapping: mappings.Mapping) -> None:
        self.mapping = mapping
        self.user: Callable[[], object] = lambda: None

    def lend(self, nbytes: int) -> torch.Tensor:
        array = self.mapping.array(nbytes)
        self.user = weakref.ref(array, _give_back(self.mapping))
        return torch.frombuffer(array, dtype=torch.uint8)


def _give_back(mapping: mappings.Mapping) -> Callable[[object], None]:
    """Called by Python as the memory's last user goes; the state is written behind whatever that one has read.

    A forked child has the same tensors: that its own die says nothing of the parent's.
    """
    process = os.getpid()

    def give_back(_: object) -> None:
        if os.getpid() == process:
            mapping.state = FREE

    return give_back
