"""What a rank has for calls of its actor: messages of the controlling process, reports for it, answers for readers."""

from __future__ import annotations

import logging
import queue
import threading

from fzero.channels import Address, ChannelError, Closed, TimedOut, connect
from fzero.channels.connection import SEND_SECONDS
from fzero.components.remote.failure import failure_of
from fzero.components.remote.host import Host
from fzero.components.remote.link import Way
from fzero.components.remote.reach import TRY_SECONDS
from fzero.components.remote.server import answered
from fzero.components.remote.through_ray import HELLO, as_received, as_sent

_log = logging.getLogger("fzero.components")


class Mailbox:
    """Calls come on threads of the actor, each of which a call has for about a second.

    The rank has it as a connection where it can open none to its controlling process: `send`, `receive`, `close`.
    """

    peer = "the controlling process, through Ray"

    def __init__(self) -> None:
        self._decided, self._why = threading.Event(), ""
        self._told: queue.SimpleQueue[tuple[object] | None] = queue.SimpleQueue()  # None behind the last one
        self._early: dict[int, object] = {}
        self._next, self._taking = 0, threading.Lock()
        self._reports: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._host: Host | None = None
        self._closed = False

    # ---- the rank

    def way(self, address: Address, token: bytes, timeout: float, name: str) -> Way:
        """The way to the controlling process: a connection, or this where none can be opened."""
        way: Way = self
        try:
            way = connect(address, token, min(TRY_SECONDS, timeout), name)
        except ChannelError as error:
            self._why = str(error)
        self._decided.set()
        return way

    def serves(self, host: Host) -> None:
        """Takes what is asked for readers."""
        self._host = host

    def send(self, message: object, timeout: float = SEND_SECONDS) -> None:
        """Reports something."""
        if self._closed:
            raise Closed(f"the way to {self.peer} is closed.")
        self._reports.put(as_sent(("report", message)))

    def receive(self, timeout: float) -> object:
        """The next message of the controlling process."""
        try:
            item = self._told.get(timeout=timeout)
        except queue.Empty:
            raise TimedOut(f"no message came from {self.peer} within {timeout:g} s.") from None
        if item is None:
            self._told.put(None)
            raise Closed(f"the way to {self.peer} is closed.")
        return item[0]

    def close(self) -> None:
        """Nothing more is reported behind what was."""
        if not self._closed:
            self._closed = True
            self._reports.put(as_sent(("end",)))
            self._told.put(None)

    # ---- calls

    def why(self, seconds: float) -> bytes:
        """Why no connection came about; empty where one did."""
        self._decided.wait(seconds)
        return self._why.encode()

    def tell(self, number: int, sent: object) -> object:
        """Takes a message of the controlling process, which numbers them."""
        try:
            message = as_received(sent)
        except Exception:
            self.close()
            raise
        with self._taking:
            self._early[number] = message
            while self._next in self._early:
                self._told.put((self._early.pop(self._next),))
                self._next += 1
        return _TAKEN

    def report(self, seconds: float) -> object:
        """The next report; ("wait",) where there is none in time."""
        try:
            return self._reports.get(timeout=seconds)
        except queue.Empty:
            return _WAIT

    def ask(self, sent: object) -> object:
        """The answer to a reader; ("wait",) where there is none in about a second, as it will ask again."""
        host = self._host
        try:
            request = as_received(sent)
            if request == HELLO or host is None:
                return _TAKEN if request == HELLO else _WAIT
            return as_sent(answered(host, request, _stop_waiting))
        except _StillWaiting:
            return _WAIT
        except Exception as error:  # what came is no request
            _log.warning("refused a request through Ray: %r", error)
            assert host is not None
            failure = failure_of(error, host.component, host.rank)
            return as_sent(("failed", tuple(failure)))


class _StillWaiting(Exception):
    """What was asked for is not there yet."""


def _stop_waiting() -> None:
    raise _StillWaiting


_WAIT, _TAKEN = as_sent(("wait",)), as_sent(("taken",))
