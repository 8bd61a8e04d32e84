"""Messages between processes of one machine, which go through memory that they share.

Gloo sends them by TCP, and its thread has to get onto a core that computes. Here the sender copies a message into a
segment of shared memory, and is done; a Unix socket says where it lies, and carries what is small; the receiver copies
it out when it waits for it. So no sender waits for a receiver, and nothing runs on a thread of its own.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import select
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Sequence

import torch

from fzero.channels.segments import AVAILABLE, FREE, RETIRED, Lender, Segment
from fzero.channels.wire import close_all

SMALL = 4096  # bytes that the socket carries
KEPT = 256 << 20  # bytes of segments for each rank that it is sent to, above which those that are free go
_HEAD = struct.Struct("=IiQ")  # the message's number, that of the segment (-1: it follows here), bytes
_TICK = 5  # milliseconds after which who waits looks whether another thread has brought it


class Peer:
    """Another rank of a group."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank, self.sock, self._lock, self._sending = rank, sock, threading.RLock(), threading.Lock()
        sock.setblocking(False)
        self.closed = False
        self._lender, self._segments = Lender(KEPT, hard=False), dict[int, Segment]()
        # by the messages' numbers, in order: what has come (the bytes, or where they lie), and what is expected
        self._come: dict[int, collections.deque[bytes | tuple[Segment, int]]] = {}
        self._expected: dict[int, collections.deque[list[torch.Tensor]]] = {}

    def send(self, tensor: torch.Tensor, number: int, until: float) -> None:
        """Sends a tensor, which may be written to afterwards."""
        nbytes, source = tensor.nbytes, tensor.data_ptr()
        if nbytes <= SMALL:
            return self._put(_HEAD.pack(number, -1, nbytes) + ctypes.string_at(source, nbytes), (), until)
        with self._sending:
            lent = self._lender.lend(nbytes, True)
            if lent is None:
                self.close()  # it would wait
                raise RuntimeError(f"There is no shared memory, or no file descriptor, for {nbytes} bytes to be sent.")
            segment, descriptors = lent
            try:
                ctypes.memmove(segment.address, source, nbytes)
                self._put(_HEAD.pack(number, segment.number, nbytes), descriptors, until)
            finally:
                close_all(descriptors)

    def _put(self, packet: bytes, descriptors: Sequence[int], until: float) -> None:
        while not self.closed:
            try:
                if descriptors:
                    socket.send_fds(self.sock, [packet], descriptors)
                else:
                    self.sock.send(packet)
                return
            except BlockingIOError:  # the other reads nothing, maybe as it sends as much
                self.progress()
                self.need_time(until)
                time.sleep(_TICK / 1000)
            except OSError:
                self.close()
        raise RuntimeError(f"Connection closed by peer, rank {self.rank} of the group.")

    def expect(self, tensor: torch.Tensor, number: int) -> list[torch.Tensor]:
        """A list that is empty once the tensor is filled."""
        left = [tensor]
        with self._lock:
            self._expected.setdefault(number, collections.deque()).append(left)
            self._match(number)
        return left

    def progress(self) -> None:
        """Takes in what has come."""
        with self._lock:
            while not self.closed:
                try:
                    packet, descriptors, _, _ = socket.recv_fds(self.sock, _HEAD.size + SMALL, 1)
                except BlockingIOError:
                    return
                except OSError:
                    packet, descriptors = b"", []
                if not packet:
                    self.close()
                    return
                number, place, nbytes = _HEAD.unpack_from(packet)
                if descriptors:
                    self._segments = {n: own for n, own in self._segments.items() if own.state != RETIRED}
                    try:
                        self._segments[place] = Segment(descriptors[0], place)
                    finally:
                        close_all(descriptors)
                if place >= 0 and place not in self._segments:
                    self.close()
                    raise RuntimeError(f"A message of rank {self.rank} of the group came without its file descriptor.")
                come = packet[_HEAD.size :] if place < 0 else (self._segments[place], nbytes)
                self._come.setdefault(number, collections.deque()).append(come)
                self._match(number)

    def _match(self, number: int) -> None:
        """Copies what has come to where it is expected."""
        while number in self._come and number in self._expected:
            come, left = self._come[number].popleft(), self._expected[number].popleft()
            for queues in (self._come, self._expected):
                if not queues[number]:
                    del queues[number]
            nbytes = len(come) if isinstance(come, bytes) else come[1]
            if nbytes != left[0].nbytes:
                self.close()  # the other is told so
                raise RuntimeError(f"Rank {self.rank} of the group sends {nbytes} bytes, expected {left[0].nbytes}.")
            source = come if isinstance(come, bytes) else come[0].address
            ctypes.memmove(left.pop().data_ptr(), source, nbytes)
            if not isinstance(come, bytes):
                come[0].state = FREE

    def need_time(self, until: float) -> None:
        if time.monotonic() > until:
            self.close()  # or each further message would be waited for as long
            raise RuntimeError(f"Timed out waiting for rank {self.rank} of the group.")

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self.sock.close()


class Neighbours:
    """The other ranks of a group, all of them processes of this machine."""

    def __init__(self, peers: Sequence[Peer], timeout: float) -> None:
        self._peers, self._timeout = peers, timeout

    def exchange(
        self, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor], number: int
    ) -> Callable[[], None]:
        """send[r] goes to rank r, receive[r] comes from it; only messages of one number meet, in order."""
        until = time.monotonic() + self._timeout
        for peer in self._peers:
            if send[peer.rank].numel():
                peer.send(send[peer.rank], number, until)
        left = [(peer, peer.expect(x, number)) for peer in self._peers if (x := receive[peer.rank]).numel()]
        for peer, _ in left:
            peer.progress()  # its segments are free the sooner
        return lambda: self._wait(left)

    def _wait(self, left: list[tuple[Peer, list[torch.Tensor]]]) -> None:
        until = time.monotonic() + self._timeout
        while True:
            for peer, _ in left:
                peer.progress()
            left[:] = [each for each in left if each[1]]
            if not left:
                return
            for peer, _ in left:
                if peer.closed:
                    raise RuntimeError(f"Connection closed by peer, rank {peer.rank} of the group.")
            left[0][0].need_time(until)
            poll = select.poll()
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                for peer, _ in left:
                    poll.register(peer.sock, select.POLLIN)
            poll.poll(_TICK)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


def meet(rank: int, size: int, gather: Callable[[str], list[str]], timeout: float) -> Neighbours | None:
    """The neighbours of a rank; None on all ranks where these are not all of one machine.

    Args:
        gather: gives the texts of all ranks, which call it at once.
    """
    name, found = f"\0fzero-{uuid.uuid4().hex}", dict[int, socket.socket]()
    with contextlib.ExitStack() as ends:
        try:
            if not AVAILABLE:
                raise OSError
            listener = ends.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(name)
            listener.listen(size)
        except OSError:
            name = ""
        names = gather(name)
        try:
            if not all(names):
                raise OSError
            for other in range(rank):
                found[other] = ends.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                found[other].connect(names[other])
                found[other].send(str(rank).encode())
        except OSError:  # it is elsewhere
            name = ""
        if not all(gather(name)):
            return None
        listener.settimeout(timeout)
        while len(found) < size - 1:
            sock, _ = listener.accept()
            sock.settimeout(timeout)
            found[int(sock.recv(16))] = sock
        ends.pop_all()
        listener.close()
    return Neighbours([Peer(other, sock) for other, sock in sorted(found.items())], timeout)
