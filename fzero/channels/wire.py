"""Bytes and descriptors through a socket, by whole pieces, with deadlines; and what can go wrong with a connection."""

from __future__ import annotations

import array
import errno
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class ChannelError(ConnectionError):
    """What went wrong with a connection to another process: the base of the errors of this wing."""


class Closed(ChannelError):
    """The connection has ended: it was closed here or there, or the peer's process has died."""


class BadMessage(Closed):
    """The peer sent what is no message; the connection is closed, as what follows cannot be told apart."""


class Refused(ChannelError):
    """No connection came about: nobody listens there, or the handshake failed, by a wrong token for example."""


class TimedOut(ChannelError, TimeoutError):
    """What was waited for did not happen in time."""


TICK = 5.0  # seconds after which whoever waits for bytes looks after what is idle
MAX_DESCRIPTORS = 64  # of one message; the kernel takes 253
_VECTOR = 512  # pieces in one call of the system, which takes 1024
_FULL = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)  # too much is under way to others: soon less


class Deadline:
    """The moment `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until then, at least a thousandth: a socket takes 0 for another mode."""
        return max(self._end - time.monotonic(), 1e-3)

    def is_over(self) -> bool:
        return time.monotonic() >= self._end


def send(
    sock: socket.socket, pieces: Sequence[memoryview], descriptors: Sequence[int], deadline: Deadline
) -> None:
    """Sends all pieces; the descriptors go with the first byte."""
    left = [piece for piece in pieces if len(piece)]
    while left:
        sock.settimeout(deadline.left())
        try:
            if descriptors:
                sent = socket.send_fds(sock, left[:_VECTOR], list(descriptors))  # type: ignore[arg-type]
            else:
                sent = sock.sendmsg(left[:_VECTOR])
        except OSError as error:
            if error.errno not in _FULL or deadline.is_over():
                raise
            time.sleep(0.001)
            continue
        descriptors = ()
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if sent:
            left[0] = left[0][sent:]


class Inlet:
    """Receives, in one thread; `idle` is called after every TICK seconds in which nothing came."""

    def __init__(self, sock: socket.socket, idle: Callable[[], None]) -> None:
        self._sock, self._idle = sock, idle
        sock.settimeout(TICK)

    def header(self, count: int) -> tuple[bytes, list[int]]:
        """The first bytes of a message, and the descriptors that came with them; EOFError says how many came."""
        data, descriptors = b"", array.array("i")
        room = socket.CMSG_SPACE(MAX_DESCRIPTORS * descriptors.itemsize)
        try:
            while len(data) < count:
                missing = count - len(data)
                more, extra, *_ = self._got(lambda n=missing: self._sock.recvmsg(n, room, socket.MSG_CMSG_CLOEXEC))
                for level, kind, numbers in extra:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        descriptors.frombytes(numbers[: len(numbers) - len(numbers) % descriptors.itemsize])
                if not more:
                    raise EOFError(len(data))
                data += more
        except BaseException:
            close_all(descriptors)
            raise
        return data, descriptors.tolist()

    def into(self, memory: memoryview) -> None:
        """Fills memory with the next bytes; raises as `header` does."""
        done = 0
        while done < len(memory):
            got = self._got(lambda at=done: self._sock.recv_into(memory[at:]))
            if not got:
                raise EOFError(done)
            done += got

    def _got(self, receive: Callable[[], Any]) -> Any:
        while True:
            try:
                return receive()
            except TimeoutError:
                self._idle()


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
