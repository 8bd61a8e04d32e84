"""Messages to a rank by calls of its Ray actor, for who can open no connection to it.

Ray carries bytes, and a flat array of bytes for each tensor; what they say is read by `fzero.channels`, as what comes
by a connection is. A large array lies in Ray's object store, from which it is copied: the store has little room, and is
gone with Ray, while a value may be kept.
"""

from __future__ import annotations

import collections
import importlib
import sys
import threading
from typing import Any

import torch

from fzero.base import private
from fzero.channels import Closed, TimedOut, tensors, vocabulary
from fzero.channels.connection import SEND_SECONDS
from fzero.channels.deadline import Deadline

LOOK_SECONDS = 1.0  # after which whoever waits looks whether Ray is still there
REPORT_SECONDS = 5.0  # after which an actor says that it has nothing to report
MOST_UNREAD = 1000  # messages that an actor may not have taken yet
HELLO = ("hello",)  # asks a rank whether anybody answers
GROUPS = {"calls": 1, "reports": 1, "values": 32}  # threads of an actor, beside that of its calls


def ray() -> Any:
    """Ray, which is imported where it is asked for."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ImportError("fz.remote(on='ray') needs ray: pip install ray, or in a clone '.[ray]'.") from error


def is_here() -> bool:
    """Whether this process is one of Ray's; where it is not, most calls of Ray would start it."""
    module = sys.modules.get("ray")
    return module is not None and module.is_initialized()


def as_sent(message: object) -> tuple[bytes, bytes, list[Any]]:
    """A message as Ray carries it: its bytes, the table of its tensors, and the bytes of each as a flat array."""
    data, values = vocabulary.encode(message)
    rows = [tensors.Row(x.dtype, tuple(x.shape)) for x in values]
    with private.below_transforms(), torch.no_grad():
        arrays = [_flat(tensors.as_contiguous(x, row)) for x, row in zip(values, rows, strict=True)]
    return data, tensors.pack(rows), arrays


def as_received(sent: Any) -> Any:
    """The message again, its tensors in memory of their own."""
    data, table, arrays = sent
    values = [tensors.empty(row) for row in tensors.unpack(memoryview(table), sum(x.size for x in arrays))]
    for value, array in zip(values, arrays, strict=True):
        _flat(value)[:] = array
    return vocabulary.decode(memoryview(data), values)


def _flat(tensor: torch.Tensor) -> Any:
    """The memory of a contiguous tensor as an array of bytes."""
    return tensor.view(-1).view(torch.uint8).numpy()


def _got(reference: object, seconds: float, peer: str) -> Any:
    """What a call of an actor returned."""
    _need_ray(peer)
    module = ray()
    try:
        return as_received(module.get(reference, timeout=seconds))
    except module.exceptions.GetTimeoutError:
        raise TimedOut(f"no message came from {peer} through Ray within {seconds:g} s.") from None
    except module.exceptions.RayTaskError as error:  # an answer found no room, for example
        raise RuntimeError(f"{peer} could not answer through Ray: {_said(error)}.") from error
    except module.exceptions.RayError as error:
        raise Closed(f"Ray lost {peer}: {_said(error)}.") from error
    except SystemExit as error:
        if threading.current_thread() is threading.main_thread():
            raise
        raise Closed(f"Ray, through which {peer} was reached, has ended in this process.") from error


def _need_ray(peer: str) -> None:
    if not is_here():
        raise Closed(f"Ray, through which {peer} was reached, has ended in this process.")


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


class Asking:
    """A reader's requests of a rank, each answered by a call.

    Args:
        name: of the actor.
        peer: the rank, in errors.

    Raises:
        Closed: there is no such actor, or this process is none of Ray's.
    """

    def __init__(self, name: str, peer: str) -> None:
        self.peer = peer
        if not is_here():
            raise Closed("this process is none of Ray's")
        try:
            actor = ray().get_actor(name)
        except Exception as error:
            raise Closed(f"Ray knows no such actor ({_said(error)})") from error
        self._ask = actor.ask.options(concurrency_group="values")
        self._request: object = None

    def send(self, message: object, timeout: float = SEND_SECONDS) -> None:
        """Takes a request."""
        self._request = as_sent(message)

    def receive(self, timeout: float) -> object:
        """The answer to it; ("wait",) is a sign of life, after which the request is made again."""
        _need_ray(self.peer)
        try:
            reference = self._ask.remote(self._request)
        except Exception as error:
            raise Closed(f"Ray cannot call {self.peer}: {_said(error)}.") from error
        return _got(reference, timeout, self.peer)

    def close(self) -> None:
        """Nothing is open."""


class Control:
    """What the controlling process tells a rank, and what that one reports: as over a connection.

    Args:
        actor: the rank's.
        peer: the rank, in errors.
    """

    def __init__(self, actor: Any, peer: str) -> None:
        self.peer = peer
        self._tell = actor.tell.options(concurrency_group="calls")
        self._report = actor.report.options(concurrency_group="reports")
        self._sending, self._sent, self._unread = threading.Lock(), 0, collections.deque[object]()
        self._awaited: object = None
        self._closed = False

    def send(self, message: object, timeout: float = SEND_SECONDS) -> None:
        """Sends a message; once it has returned, tensors may be changed.

        Raises:
            TimedOut: the rank did not take earlier ones.
            Closed: it has ended, or Ray has.
        """
        sent = as_sent(message)
        deadline = Deadline(timeout)
        with self._sending:
            self._need_open()
            if self._sent % 64 == 0 or len(self._unread) >= MOST_UNREAD:
                self._forget_taken(deadline)
            try:
                self._unread.append(self._tell.remote(self._sent, sent))
            except Exception as error:
                raise Closed(f"Ray cannot call {self.peer}: {_said(error)}.") from error
            self._sent += 1

    def receive(self, timeout: float) -> object:
        """The next report; one thread at a time receives.

        Raises:
            TimedOut: there was none in time.
            Closed: the rank has ended, or closed its side.
        """
        deadline = Deadline(timeout)
        while True:
            self._need_open()
            if self._awaited is None:
                self._awaited = self._report.remote(REPORT_SECONDS)
            try:
                kind, *rest = _got(self._awaited, min(deadline.left(), LOOK_SECONDS), self.peer)
            except TimedOut:
                if not deadline.left():
                    raise
                continue
            self._awaited = None
            if kind == "report":
                return rest[0]
            if kind == "end":
                self._closed = True

    def close(self) -> None:
        """Ends it here."""
        self._closed = True

    def _forget_taken(self, deadline: Deadline) -> None:
        """Forgets messages that the rank has taken; waits where too many are left."""
        while self._unread:
            full = len(self._unread) >= MOST_UNREAD
            try:
                _got(self._unread[0], deadline.left() if full else 0.0, self.peer)
            except TimedOut:
                if full:
                    raise
                return
            except RuntimeError as error:
                raise Closed(str(error)) from error
            self._unread.popleft()

    def _need_open(self) -> None:
        _need_ray(self.peer)
        if self._closed:
            raise Closed(f"the messages to and from {self.peer} through Ray have ended.")
