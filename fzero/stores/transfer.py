"""One tensor on its way to or from a file: chunks that several threads take in turn, and one end."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from typing import NamedTuple

from fzero.stores import blocks
from fzero.stores.blocks import Bounce
from fzero.stores.handle import Handle
from fzero.stores.pool import Latch, Pool


class Stopped(Exception):
    """Nobody wants the end of this transfer."""


class Failure(NamedTuple):
    """What went wrong first, and from which byte of the file on."""

    offset: int
    cause: BaseException


class Transfer(ABC):
    """Opens a file once, moves chunks until there are none left or one fails, and ends once, whatever happens.

    Its threads hold what it moves; nobody has to wait for it.
    """

    def __init__(self, nbytes: int, threads: int) -> None:
        self.nbytes, self.chunk = nbytes, blocks.CHUNK
        self.failure: Failure | None = None
        self._running = self._runners = max(1, min(threads, math.ceil(nbytes / self.chunk)))
        self._unbegun = [None]  # whoever takes this decides whether it begins
        self._next = 0
        self._handle: Handle | None = None
        self._lock, self._ended = threading.Lock(), Latch()

    @abstractmethod
    def open(self) -> Handle:
        """Opens the file; called once."""

    @abstractmethod
    def move(self, handle: Handle, begin: int, end: int, bounce: Bounce) -> None:
        """Moves one chunk."""

    @abstractmethod
    def stopped(self) -> str:
        """Why it is no longer worth the while; "" where it is."""

    @abstractmethod
    def complete(self) -> None:
        """All chunks are moved, and the file is closed; what this raises is a failure too."""

    @abstractmethod
    def let_go(self) -> None:
        """The very end, after a failure too: lets go of what is held."""

    def start(self, pool: Pool) -> None:
        """Begins, or ends at once where there are no threads. An interrupt is raised; it has begun then, or ended."""
        try:
            pool.submit(lambda bounce: self._begin(pool, bounce), self._runners)
        except BaseException as error:
            if self._claimed():
                self._fail(0, error)
                self._end()
            if not isinstance(error, Exception):
                raise

    def _claimed(self) -> bool:
        """Whether the caller decides what becomes of it: the first thread that comes for it, or who ends it before."""
        try:
            self._unbegun.pop()
        except IndexError:
            return False
        return True

    def _begin(self, pool: Pool, bounce: Bounce) -> None:
        """What the first thread does: no signal comes between what it asks of the others."""
        if not self._claimed():
            return
        for _ in range(self._runners - 1):
            try:
                pool.put(self._run)
            except Exception:  # the threads are ending, or memory is short: this one does it all
                with self._lock:
                    self._running -= 1
        self._run(bounce)

    def wait(self) -> None:
        """Waits for the end; `failure` then says how it was."""
        self._ended.wait()

    @property
    def ended(self) -> bool:
        return self._ended.is_open

    def _run(self, bounce: Bounce) -> None:
        """What each thread does."""
        begin = 0
        try:
            handle = self._opened()
            while (taken := self._take()) is not None:
                begin = taken
                self.move(handle, begin, min(begin + self.chunk, self.nbytes), bounce)
        except BaseException as error:
            self._fail(begin, error)
        with self._lock:
            self._running -= 1
            last = not self._running
        if last:
            self._end()

    def _opened(self) -> Handle:
        with self._lock:
            if self.failure is not None:
                raise Stopped("it failed on another thread")
            self._need_wanted()
            if self._handle is None:
                try:
                    self._handle = self.open()
                except BaseException as error:  # before another thread comes to open it
                    self.failure = Failure(0, error.with_traceback(None))
                    raise
            return self._handle

    def _need_wanted(self) -> None:
        if why := self.stopped():
            raise Stopped(why)

    def _take(self) -> int | None:
        """Where the next chunk begins."""
        self._need_wanted()
        with self._lock:
            if self.failure is not None or self._next >= self.nbytes:
                return None
            begin, self._next = self._next, self._next + self.chunk
            return begin

    def _fail(self, offset: int, error: BaseException) -> None:
        with self._lock:
            if self.failure is None:
                # its frames hold what was moved, and whoever keeps the error would keep that
                self.failure = Failure(offset, error.with_traceback(None))

    def _end(self) -> None:
        try:
            if self._handle is not None:
                self._handle.close()
            if self.failure is None:
                self.complete()
        except BaseException as error:
            self._fail(0, error)
        finally:
            self.let_go()
            self._ended.open()
