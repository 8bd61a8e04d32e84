"""Bytes and descriptors through a socket that does not block, by whole pieces, with deadlines."""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

from fzero.channels.deadline import Deadline
from fzero.channels.errors import BadMessage, TimedOut
from fzero.channels.frames import MAX_DESCRIPTORS

TICK = 5.0  # seconds after which whoever waits for bytes looks after what is idle
_BUFFER = 64 << 10  # bytes that are read ahead
_VECTOR = 512  # pieces in one call of the system, which takes 1024
_FULL = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)  # too much is under way to others: soon less

Pieces = Sequence[memoryview]


class Outlet:
    """Sends. Its owner calls it from one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._poll = sock, select.poll()
        self._poll.register(sock, select.POLLOUT)
        self.begun = False  # whether a part of the pieces is on its way

    def send(self, pieces: Pieces, descriptors: Sequence[int], deadline: Deadline) -> None:
        """Sends all of them; the descriptors go with the first byte.

        Raises:
            TimedOut: not in time; `begun` says whether a part is on its way.
            OSError: the connection is broken.
        """
        self.begun = False
        left = deque(piece for piece in pieces if len(piece))
        while left:
            window = [left[i] for i in range(min(len(left), _VECTOR))]
            try:
                if descriptors:
                    sent = socket.send_fds(self._sock, window, list(descriptors))  # type: ignore[arg-type]
                else:
                    sent = self._sock.sendmsg(window)
            except BlockingIOError:
                if not self._poll.poll(deadline.milliseconds()):
                    raise TimedOut from None
                continue
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                if not deadline.left():
                    raise TimedOut from error
                time.sleep(0.001)
                continue
            self.begun, descriptors = True, ()
            while sent:
                piece = left.popleft()
                if sent < len(piece):
                    left.appendleft(piece[sent:])
                    break
                sent -= len(piece)


class Inlet:
    """Receives, in one thread; `idle` is called about every TICK seconds."""

    def __init__(self, sock: socket.socket, takes_descriptors: bool, idle: Callable[[], None]) -> None:
        self._sock, self._poll, self._idle = sock, select.poll(), idle
        self._poll.register(sock, select.POLLIN)
        self._room = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize) if takes_descriptors else 0
        self._buffer = memoryview(bytearray(_BUFFER))
        self._begin = self._end = 0  # of what was read ahead
        self._next_tick = time.monotonic() + TICK
        self._dry = True  # whether there may be nothing to receive
        self.descriptors: deque[int] = deque()

    def exactly(self, count: int) -> bytes:
        """The next bytes.

        Raises:
            EOFError: there are fewer, as the peer is gone; its argument says how many.
        """
        if count <= _BUFFER:
            while self._end - self._begin < count:
                if self._end == self._begin or count > _BUFFER - self._begin:
                    kept = bytes(self._buffer[self._begin : self._end])
                    self._buffer[: len(kept)] = kept
                    self._begin, self._end = 0, len(kept)
                try:
                    self._end += self._receive([self._buffer[self._end :]])
                except EOFError:
                    raise EOFError(self._end - self._begin) from None
            data = bytes(self._buffer[self._begin : self._begin + count])
            self._begin += count
            return data
        whole = bytearray(count)
        self.into([memoryview(whole)])
        return bytes(whole)

    def into(self, pieces: Pieces) -> None:
        """Fills memory with the next bytes, most of them without a copy in between."""
        left = deque(piece for piece in pieces if len(piece))
        done = 0
        while left:
            if self._end > self._begin:
                piece = left[0]
                got = min(len(piece), self._end - self._begin)
                piece[:got] = self._buffer[self._begin : self._begin + got]
                self._begin += got
            else:
                rest = sum(len(left[i]) for i in range(min(len(left), _VECTOR)))
                try:
                    if rest < _BUFFER:  # many small ones: the next message may come along
                        self._begin, self._end = 0, 0
                        self._end = self._receive([self._buffer])
                        continue
                    got = self._receive([left[i] for i in range(min(len(left), _VECTOR))])
                except EOFError:
                    raise EOFError(done) from None
            done += got
            while got:
                piece = left.popleft()
                if got < len(piece):
                    left.appendleft(piece[got:])
                    break
                got -= len(piece)

    def _receive(self, pieces: Pieces) -> int:
        """Receives something; waits where there is nothing."""
        while True:
            if time.monotonic() >= self._next_tick:
                self._idle()
                self._next_tick = time.monotonic() + TICK
            if self._dry and not self._poll.poll(max(1, int(1000 * (self._next_tick - time.monotonic())))):
                continue
            try:
                if self._room:
                    got, extra, flags, _ = self._sock.recvmsg_into(pieces, self._room, socket.MSG_CMSG_CLOEXEC)
                    if extra or flags & socket.MSG_CTRUNC:
                        self._keep(extra, flags)
                else:
                    got = self._sock.recvmsg_into(pieces)[0]
            except BlockingIOError:
                self._dry = True
                continue
            self._dry = got < len(pieces[-1])  # likely: asking poll costs less than an error
            if not got:
                raise EOFError(0)
            return got

    def _keep(self, extra: Sequence[tuple[int, int, bytes]], flags: int) -> None:
        """Keeps descriptors until the message that they belong to is read."""
        for level, kind, data in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                self.descriptors.extend(numbers)
        if flags & socket.MSG_CTRUNC:
            raise BadMessage("descriptors of shared memory did not arrive: this process may have no more of them")

    def close(self) -> None:
        """Closes descriptors that nobody has taken."""
        while self.descriptors:
            os.close(self.descriptors.popleft())
