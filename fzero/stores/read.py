"""A tensor on its way out of a file."""

from __future__ import annotations

import os
import zlib

import torch

from fzero.stores import blocks
from fzero.stores.blocks import Bounce, Memory
from fzero.stores.content import Content, Shared
from fzero.stores.handle import Handle, Replaced
from fzero.stores.transfer import Transfer


class Unread(Exception):
    """A file holds something else than was written."""


class Read(Transfer):
    """Fills a target from a whole file. A chunk that fails or comes back short is read once more."""

    def __init__(self, content: Content, target: torch.Tensor, shared: Shared) -> None:
        super().__init__(content.nbytes, content.disk.threads)
        self.content = content
        self._memory: Memory | None = Memory(target)
        self._shared = shared

    def stopped(self) -> str:
        return self.content.stopped(self._shared)

    def open(self) -> Handle:
        try:
            return self._open()
        except OSError:
            self.content.count_repeated()
        return self._open()

    def _open(self) -> Handle:
        return self._shared.opener.open(self.content.path, os.O_RDONLY, self.content.disk.direct)

    def move(self, handle: Handle, begin: int, end: int, bounce: Bounce) -> None:
        content, memory = self.content, self._memory
        assert memory is not None

        def read() -> int:
            return blocks.read(handle, memory, begin, end, bounce)

        def attempt() -> int:
            return self._shared.opener.attempt(content.path, handle, content.disk.direct, read)

        try:
            got = attempt()
        except OSError:
            got = 0
        if got < end - begin:
            content.count_repeated()
            got = attempt()
        if got < end - begin:
            raise Unread(f"got {got} of {end - begin} bytes: the file was cut short")
        if content.sums and zlib.crc32(memory.bytes[begin:end]) != content.sums[begin // self.chunk]:
            raise Unread(f"the {end - begin} bytes there are not those that were written (their checksum differs)")

    def complete(self) -> None:
        pass

    def let_go(self) -> None:
        self._memory = None

    def finish(self) -> None:
        """Waits for the values; from any thread, any number of times.

        Raises:
            RuntimeError: they could not be read, this time or for ever.
        """
        self.wait()
        if self.failure is None:
            return
        offset, cause = self.failure
        if isinstance(cause, FileNotFoundError):
            said, lost = f"got 0 of {self.nbytes} bytes: the file is gone", True
        elif isinstance(cause, Replaced):
            said, lost = f"{cause.strerror}", True
        else:
            lost = isinstance(cause, Unread)
            said = str(cause) if lost else f"{type(cause).__name__}: {cause}"
        raise RuntimeError(
            f"Reading {self.content.what} from {self.content.path} failed at byte {offset} of {self.nbytes}: {said}. "
            f"{_LOST if lost else _UNREACHED}"
        ) from cause


_LOST = "It is lost: begin again from a checkpoint, and let nobody touch the files in the folder of fz.Disk."
_UNREACHED = (
    "The file is still there, and is read anew when it is asked for again: free what is short, or where the disk "
    "itself fails, begin again from a checkpoint on another one."
)
