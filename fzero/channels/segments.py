"""Shared memory: segments that the sender lends, that tensors of the receiver use, that are given back and lent again.

A segment is an anonymous file in memory that two processes map: the kernel takes it back whoever dies. Its first byte
says who has it: the sender writes IN_USE before it tells the receiver, the receiver FREE once the last tensor over it
has died, and the sender RETIRED when it lets go of a free one. So giving back needs neither a message nor a lock, and
may happen wherever Python frees a tensor.
"""

from __future__ import annotations

import os
import time
import weakref

import torch

from fzero.base import private, thread_state
from fzero.channels.tensors import Row, shaped
from fzero.channels.wire import BadMessage

AVAILABLE = hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
PAGE = 4096  # bytes ahead of the data
SHARED_FROM = 64 << 10  # bytes of a tensor from which on it goes through shared memory
POOL_BYTES = 2 << 30  # bytes of the segments that one side of a connection lends, lent and idle; beyond, inline
IDLE_SECONDS = 10.0  # for which a free segment is kept

FREE, IN_USE, RETIRED = 0, 1, 2


class Segment:
    """A page and the data behind it, mapped as long as this object or a tensor over it lives.

    Args:
        descriptor: of its file, which may be closed afterwards.
        number: by which both sides know it.

    Attributes:
        address: of the data.
    """

    def __init__(self, descriptor: int, number: int) -> None:
        size = os.fstat(descriptor).st_size
        path = f"/proc/self/fd/{descriptor}"
        with thread_state.without_dispatch_modes(), private.under_function_modes(()):
            self._memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8, device="cpu").numpy()
        self.address: int = self._memory.ctypes.data + PAGE
        self.number, self.capacity, self.used = number, size - PAGE, time.monotonic()
        self._user: weakref.ref[object] | None = None

    @property
    def state(self) -> int:
        return int(self._memory[0])

    @state.setter
    def state(self, value: int) -> None:
        self._memory[0] = value

    @property
    def is_used(self) -> bool:
        """Whether a tensor here lies in it."""
        return self._user is not None and self._user() is not None

    def bytes(self, nbytes: int) -> torch.Tensor:
        """The first bytes of the data."""
        return torch.from_numpy(self._memory[PAGE : PAGE + nbytes])

    def borrowed(self, nbytes: int) -> torch.Tensor:
        """The same: the segment is free again when nothing uses their storage any more.

        A forked child has the same tensors: that its own die says nothing of the parent's.
        """
        array, memory, process = self._memory[PAGE : PAGE + nbytes], self._memory, os.getpid()

        def give_back(_: object) -> None:  # behind whatever the last user has read
            if os.getpid() == process:
                memory[0] = FREE

        self._user = weakref.ref(array, give_back)
        return torch.from_numpy(array)


class Lender:
    """The sender's segments. Its owner calls it from one thread at a time.

    Args:
        limit: of their bytes; above it what is free goes.
        hard: whether none is made above it.
    """

    def __init__(self, limit: int = POOL_BYTES, hard: bool = True) -> None:
        self.limit, self._hard, self.nbytes = limit, hard, 0
        self._by_capacity: dict[int, list[Segment]] = {}
        self._next = 0

    def lend(self, nbytes: int, may_create: bool) -> tuple[Segment, list[int]] | None:
        """A segment for that many bytes, with its descriptor where it is new; None where there is none to be had."""
        capacity = size_class(nbytes)
        for segment in reversed(self._by_capacity.get(capacity, ())):
            if segment.state == FREE:
                segment.state, segment.used = IN_USE, time.monotonic()
                return segment, []
        if not may_create:
            return None
        self.trim(IDLE_SECONDS if self.nbytes + capacity <= self.limit else 0.0)
        if self._hard and self.nbytes + capacity > self.limit:
            return None
        try:
            segment, descriptor = create(capacity, self._next)
        except (OSError, RuntimeError):  # no memory or no descriptors: the tensor goes another way
            return None
        segment.state = IN_USE
        self._next += 1
        self._by_capacity.setdefault(capacity, []).append(segment)
        self.nbytes += capacity
        return segment, [descriptor]

    def trim(self, idle: float = IDLE_SECONDS) -> None:
        """Lets go of segments that were free for `idle` seconds."""
        before = time.monotonic() - idle
        for group in self._by_capacity.values():
            for segment in [own for own in group if own.used <= before and own.state == FREE]:
                segment.state = RETIRED
                group.remove(segment)
                self.nbytes -= segment.capacity


def create(capacity: int, number: int) -> tuple[Segment, int]:
    """A new segment, and its descriptor, which the caller closes."""
    descriptor = os.memfd_create("fzero", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, PAGE + capacity)  # fails where a later write would kill
        return Segment(descriptor, number), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def size_class(nbytes: int) -> int:
    """A little more, so that tensors of about the same size share segments: eight classes from each power of two on."""
    step = max(1 << max(nbytes.bit_length() - 4, 0), PAGE)
    return -(-nbytes // step) * step


class Borrower:
    """The receiver's side of the other's segments. Its owner calls it from one thread at a time."""

    def __init__(self) -> None:
        self._mapped: dict[int, Segment] = {}

    def tensor(self, row: Row, descriptors: list[int]) -> torch.Tensor:
        """The tensor that lies in a segment.

        Args:
            descriptors: of the segments that are new in this message, in order: that of this one is taken.
        """
        if row.segment not in self._mapped:
            if not descriptors:
                raise BadMessage(f"segment {row.segment} is new, and came without its descriptor")
            self.trim()
            descriptor = descriptors.pop(0)
            try:
                self._mapped[row.segment] = Segment(descriptor, row.segment)
            finally:
                os.close(descriptor)
        segment = self._mapped[row.segment]
        if not 0 < row.nbytes <= segment.capacity:
            raise BadMessage(f"a tensor of {row.nbytes} bytes in segment {row.segment}, which does not hold it")
        if segment.is_used:
            raise BadMessage(f"segment {row.segment} comes again while tensors still lie in it")
        return shaped(segment.borrowed(row.nbytes), row)

    def trim(self) -> None:
        """Lets go of what the sender has let go of."""
        self._mapped = {number: one for number, one in self._mapped.items() if one.state != RETIRED}
