"""A connection: messages to and from one other process."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
import weakref
from typing import Any

import torch

from fzero.base import private
from fzero.channels import tensors, vocabulary, wire
from fzero.channels.segments import SHARED_FROM, Borrower, Lender
from fzero.channels.wire import BadMessage, ChannelError, Closed, Deadline, TimedOut

SEND_SECONDS = 60.0  # that a send waits for a peer that does not read
CLOSE_SECONDS = 1.0  # that closing waits for the peer to have read what was sent

# A message is a header, the tree with the rows of its tensors (by `vocabulary`), then the bytes of the tensors that do
# not lie in shared memory, one behind the other. A goodbye is a header alone.
HEADER = struct.Struct("<4sQ")  # magic, bytes of the tree and rows
MAGIC = b"fz\x03\n"
# what has open sockets: a forked child lets go of its parent's by `forget`, or the peer would not see the parent end
open_here: weakref.WeakSet[Any] = weakref.WeakSet()


def _forked() -> None:
    for one in list(open_here):
        one.forget()
    open_here.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Connection:
    """Messages to and from one other process, which may end without anybody else ending.

    All threads may send and receive; a message is received once. What arrives is read by a thread of the connection as
    it comes, into memory without a bound: so a send never waits for long for a peer that is itself sending, or
    computing, whatever circle processes form; who would send much that nobody receives waits for an answer now and
    then. The end of the peer is noticed by that thread, too, and by everybody who waits.

    `connection.peer` is the peer's name, `connection.transport` "unix" or "tcp".
    """

    def __init__(self, sock: socket.socket, peer: str, shares: bool) -> None:
        unix = sock.family == getattr(socket, "AF_UNIX", None)
        self.peer, self.transport = peer, "unix" if unix else "tcp"
        self._sock, self._out = sock, sock.dup()  # each with a timeout of its own: for the reader, and for who sends
        self._inlet = wire.Inlet(sock, self._look_after)
        self._lender, self._borrower = Lender() if unix and shares else None, Borrower()
        self._sending, self._ending = threading.Lock(), threading.Lock()
        self._inbox: queue.SimpleQueue[tuple[object] | None] = queue.SimpleQueue()  # None behind the last message
        self._end: tuple[type[Closed], str] | None = None
        self._closed_here = False
        self._over = threading.Event()  # nothing more will be read
        self._reader = threading.Thread(target=self._read, name=f"fzero channel with {peer}", daemon=True)
        open_here.add(self)
        self._reader.start()

    def send(self, message: object, timeout: float = SEND_SECONDS) -> None:
        """Sends a message: a value of the vocabulary (see `fzero.channels.vocabulary`), with tensors.

        Once it has returned, the tensors may be changed or freed. They arrive on the CPU, contiguous. Where both
        processes are on one machine, tensors of at least `SHARED_FROM` bytes lie in shared memory, and are not copied
        a second time; their storages cannot be resized.

        Args:
            message: what is sent.
            timeout: seconds that the peer may take to read.

        Raises:
            TypeError: the message holds what cannot be sent, or a tensor that is more than its values.
            ValueError: it is too deep.
            TimedOut: the peer did not read in time; the connection is closed. Or another send took that long.
            Closed: the connection has ended.

        Example:
            >>> import secrets
            >>> from fzero.channels import Listener, connect
            >>> token = secrets.token_bytes(32)
            >>> with Listener(token) as listener, connect(listener.address, token, timeout=5.0) as here:
            ...     with listener.accept(timeout=5.0) as there:
            ...         here.send({"step": 3, "loss": torch.tensor(0.5)})
            ...         there.receive(timeout=5.0)
            {'step': 3, 'loss': tensor(0.5000)}
        """
        deadline = Deadline(timeout)
        tree, values = vocabulary.encode(message)
        if not self._sending.acquire(timeout=deadline.seconds):
            raise TimedOut(f"{self.peer} let another send wait; this one gave up after {timeout} s.")
        try:
            if self._end is not None:
                raise self._ended()
            self._send(tree, values, deadline)
        finally:
            self._sending.release()

    def _send(self, tree: bytes, values: list[torch.Tensor], deadline: Deadline) -> None:
        """Sends, or ends the connection."""
        descriptors: list[int] = []
        try:
            wire.send(self._out, self._pieces(tree, values, descriptors), descriptors, deadline)
        except TimeoutError:
            self._finish(Closed, f"a message took longer than {deadline.seconds} s")
            raise TimedOut(
                f"{self.peer} did not read a message within {deadline.seconds} s; the connection is closed."
            ) from None
        except OSError as error:
            self._over.wait(CLOSE_SECONDS)  # the reader reads what the peer said last, and why it ended
            self._finish(Closed, f"sending failed: {error!r}")
            raise self._ended() from error
        except BaseException as error:
            self._finish(Closed, f"sending failed: {error!r}")
            raise
        finally:
            wire.close_all(descriptors)

    def _pieces(self, tree: bytes, values: list[torch.Tensor], descriptors: list[int]) -> list[memoryview]:
        """A message as it goes through the socket; the descriptors of new segments go to a list."""
        rows, inline = [], []
        with private.below_transforms(), torch.no_grad():
            for value in values:
                row = tensors.Row(value.dtype, tuple(value.shape))
                lent = None
                if self._lender is not None and row.nbytes >= SHARED_FROM:
                    lent = self._lender.lend(row.nbytes, len(descriptors) < wire.MAX_DESCRIPTORS)
                if lent is None:
                    inline.append(tensors.memory(tensors.as_contiguous(value, row)))
                else:
                    segment, new = lent
                    descriptors += new
                    row = row._replace(segment=segment.number)
                    tensors.shaped(segment.bytes(row.nbytes), row).copy_(value)
                rows.append(row)
        body = vocabulary.encode((tree, rows))[0]
        return [memoryview(HEADER.pack(MAGIC, len(body)) + body), *inline]

    def receive(self, timeout: float) -> object:
        """The next message.

        Messages that arrived before the peer's end are received before the error.

        Raises:
            TimedOut: none came within `timeout` seconds.
            Closed: the connection has ended.
            BadMessage: it has ended because of what the peer sent.
        """
        if self._closed_here:
            raise self._ended()
        try:
            item = self._inbox.get(timeout=timeout)
        except queue.Empty:
            raise TimedOut(f"no message came from {self.peer} within {timeout} s.") from None
        if item is None or self._closed_here:
            self._inbox.put(None)  # for whoever waits beside
            raise self._ended()
        return item[0]

    def close(self) -> None:
        """Ends the connection on both sides; who waits gets `Closed`. What was sent still arrives.

        It waits for at most `CLOSE_SECONDS` until the peer has read. Closing twice does nothing.
        """
        self._closed_here = True
        if self._settle(Closed, "it was closed here"):
            self._inbox.put(None)
            if self._sending.acquire(timeout=0.1):
                with contextlib.suppress(OSError):
                    wire.send(self._out, [memoryview(HEADER.pack(MAGIC, 0))], (), Deadline(0.1))
                self._sending.release()
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)  # what comes is still read, or the system would drop what was sent
        if threading.current_thread() is not self._reader:
            self._reader.join(CLOSE_SECONDS)
            if self._reader.is_alive():
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
                self._reader.join(CLOSE_SECONDS)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Connection to {self.peer} by {self.transport}{', ended' if self._end else ''}>"

    def forget(self) -> None:
        """In a forked child, where no thread reads: the connection is the parent's."""
        self._sending, self._ending = threading.Lock(), threading.Lock()
        self._end, self._closed_here = (Closed, "it belongs to the process that this one was forked from"), True
        for sock in (self._sock, self._out):
            with contextlib.suppress(OSError):
                os.close(sock.detach())

    def _ended(self) -> Closed:
        assert self._end is not None
        kind, why = self._end
        return kind(f"the connection to {self.peer} has ended: {why}.")

    def _settle(self, kind: type[Closed], why: str) -> bool:
        """Notes why the connection has ended; the first reason counts."""
        with self._ending:
            first, self._end = self._end is None, self._end or (kind, why)
            return first

    def _finish(self, kind: type[Closed], why: str) -> None:
        """Ends the connection for all who use it. The reader closes the socket."""
        if self._settle(kind, why):
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        """What the reader does, until the peer or this side ends."""
        try:
            while True:
                self._inbox.put((self._message(),))
        except ChannelError as error:
            self._finish(type(error) if isinstance(error, Closed) else Closed, str(error))
        except EOFError as error:
            within = f"within a message, behind {error} bytes of a part" if error.args[0] else "without a goodbye"
            self._finish(Closed, f"it ended {within}; its process may have died")
        except OSError as error:
            self._finish(Closed, f"it broke: {error}; its process or machine may have died")
        except Exception as error:  # no memory for what came, for example
            self._finish(BadMessage, f"what came could not be taken: {error!r}")
        self._over.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with self._sending:  # whoever sends has seen the end
            self._sock.close()
            self._out.close()
            self._lender = None
        open_here.discard(self)
        self._inbox.put(None)

    def _message(self) -> object:
        """The next message of the socket."""
        head, descriptors = self._inlet.header(HEADER.size)
        try:
            magic, size = HEADER.unpack(head)
            if magic != MAGIC:
                raise BadMessage(f"a message begins with {head!r}, which is no header")
            if not size:
                raise Closed("it was closed there")
            body = bytearray(size)
            self._inlet.into(memoryview(body))
            tree, rows = vocabulary.decode(body, ())
            values = []
            for row in rows:
                if row.segment == tensors.INLINE:
                    values.append(tensors.empty(row))
                    self._inlet.into(tensors.memory(values[-1]))
                else:
                    values.append(self._borrower.tensor(row, descriptors))
            return vocabulary.decode(tree, values)
        finally:
            wire.close_all(descriptors)

    def _look_after(self) -> None:
        """Gives back what is idle."""
        self._borrower.trim()
        if self._lender is not None and self._sending.acquire(blocking=False):
            try:
                self._lender.trim()
            finally:
                self._sending.release()
