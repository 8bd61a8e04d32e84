"""One tensor on its way to or from a file: chunks that several threads take in turn, and one end."""

from __future__ import annotations

import math
import os
import threading
from typing import NamedTuple

import torch

from fzero.stores import blocks
from fzero.stores.blocks import Bounce, Memory
from fzero.stores.content import Content, Shared
from fzero.stores.handle import Handle


class Stopped(Exception):
    """Nobody wants the end of this transfer."""


class Failure(NamedTuple):
    """What went wrong first, and from which byte of the file on."""

    offset: int
    cause: BaseException


class Transfer:
    """Opens a file once, moves chunks until there are none left or one fails, and ends once, whatever happens.

    Its threads hold what it moves; nobody has to wait for it.
    """

    def __init__(self, content: Content, tensor: torch.Tensor, shared: Shared) -> None:
        self.content, self.nbytes, self.chunk = content, content.nbytes, blocks.CHUNK
        self.failure: Failure | None = None
        self.ended = False
        self._shared = shared
        self._memory: Memory | None = Memory(tensor)
        self._running = max(1, min(content.disk.threads, math.ceil(self.nbytes / self.chunk)))
        self._next = 0
        self._handle: Handle | None = None
        self._lock, self._door = threading.Lock(), threading.Lock()
        self._door.acquire()  # open at the end; threading's Event may be left locked by an interrupt

    def open(self) -> Handle:
        """Opens the file; called once."""
        raise NotImplementedError

    def move(self, handle: Handle, memory: Memory, begin: int, end: int, bounce: Bounce) -> None:
        """Moves one chunk."""
        raise NotImplementedError

    def complete(self) -> None:
        """All chunks are moved, and the file is closed; what this raises is a failure too."""

    def let_go(self) -> None:
        """The very end, after a failure too: lets go of what is held."""

    def start(self) -> None:
        """Begins, or ends at once where there are no threads."""
        try:
            self._shared.pool.submit(self._run, self._running)
        except Exception as error:
            self._fail(0, error)
            self._end()

    def wait(self) -> None:
        """Waits for the end; `failure` then says how it was."""
        if not self.ended:
            with self._door:
                pass

    def _run(self, bounce: Bounce) -> None:
        """What each thread does."""
        begin, memory = 0, self._memory
        assert memory is not None
        try:
            handle = self._opened()
            while (taken := self._take()) is not None:
                begin = taken
                self.move(handle, memory, begin, min(begin + self.chunk, self.nbytes), bounce)
        except BaseException as error:
            self._fail(begin, error)
        del memory  # whoever waits for the end wants it alone
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
        if self.content.dropped:
            raise Stopped("nobody refers to it any more")
        if self._shared.pool.closed:
            raise Stopped("the folder was closed")

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
                os.close(self._handle.descriptor)
            if self.failure is None:
                self.complete()
        except BaseException as error:
            self._fail(0, error)
        finally:
            self._memory = None
            self.let_go()
            self.ended = True
            self._door.release()
