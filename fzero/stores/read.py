"""A tensor on its way out of a file."""

from __future__ import annotations

import contextlib
import os
import zlib

from fzero.stores import blocks
from fzero.stores.blocks import Bounce, Memory
from fzero.stores.handle import Handle
from fzero.stores.transfer import Transfer


class Unread(Exception):
    """A file holds something else than was written."""


class Read(Transfer):
    """Fills a target from a whole file. A chunk that fails or comes back short is read once more."""

    def open(self) -> Handle:
        try:
            return self._open()
        except OSError:
            return self._open()

    def _open(self) -> Handle:
        return self._shared.open(self.content.path, os.O_RDONLY, self.content.disk)

    def move(self, handle: Handle, memory: Memory, begin: int, end: int, bounce: Bounce) -> None:
        got, sums = 0, self.content.sums
        with contextlib.suppress(OSError):
            got = blocks.read(handle, memory, begin, end, bounce)
        if got < end - begin:
            got = blocks.read(handle, memory, begin, end, bounce)
        if got < end - begin:
            raise Unread(f"got {got} of {end - begin} bytes: the file was cut short")
        if sums and zlib.crc32(memory.bytes[begin:end]) != sums[begin // self.chunk]:
            raise Unread(f"the {end - begin} bytes there are not those that were written (their checksum differs)")

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
