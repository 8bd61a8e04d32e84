"""A tensor on its way into a file."""

from __future__ import annotations

import contextlib
import errno
import os
import zlib

import torch

from fzero.stores import blocks
from fzero.stores.blocks import Bounce, Memory
from fzero.stores.content import Content, Shared, remove
from fzero.stores.handle import Handle
from fzero.stores.transfer import Stopped, Transfer

_NOT_HERE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)  # a filesystem that cannot reserve space


class Write(Transfer):
    """Fills a file under another name, and gives it its own when it is whole.

    The source is let go when that has gone well or nobody wants it; after a failure it is all that there is.
    """

    def __init__(self, content: Content, source: torch.Tensor, shared: Shared) -> None:
        super().__init__(content, source, shared)
        self.source: torch.Tensor | None = source

    def open(self) -> Handle:
        content, shared = self.content, self._shared
        over, content.over = content.over, None
        if over is not None:
            with contextlib.suppress(FileNotFoundError):  # somebody has deleted it
                os.rename(over, content.part)
                return shared.open(content.part, os.O_WRONLY, content.disk)
        handle = shared.open(content.part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, content.disk)
        try:
            _reserve(handle.descriptor, content.room)
        except BaseException:
            os.close(handle.descriptor)
            raise
        return handle

    def move(self, handle: Handle, memory: Memory, begin: int, end: int, bounce: Bounce) -> None:
        if self.content.sums:
            self.content.sums[begin // self.chunk] = zlib.crc32(memory.bytes[begin:end])
        blocks.write(handle, memory, begin, end, bounce)

    def complete(self) -> None:
        os.rename(self.content.part, self.content.path)
        self.content.whole = True
        self._shared.failing.clear()

    def let_go(self) -> None:
        if self.failure is not None:
            remove(self.content.part)
        if self.failure is None or self.content.dropped:
            self.source = None
        self._shared.room.give(self)

    def check(self) -> None:
        """Says how it went, at its end.

        Raises:
            OSError: why it could not be written, and with how much space there.
            RuntimeError: something else was in the way.
        """
        if self.failure is None:
            return
        offset, cause = self.failure
        if isinstance(cause, Stopped):
            raise RuntimeError(f"{self.content.what} was not written to {self.content.path}: the interpreter ends.")
        said = (
            f"Writing {self.content.what} to {self.content.path} failed at byte {offset} of {self.nbytes}: "
            f"{_reason(cause)}. {self.content.room} bytes are needed there, {_free(self.content.path)} are free. The "
            "values are kept in memory, where later calls read them, and written as soon as they can be: make room, or "
            "give another folder, fz.Disk(path)."
        )
        number = cause.errno if isinstance(cause, OSError) else None
        raise RuntimeError(said) if number is None else OSError(number, said)


def _reserve(descriptor: int, nbytes: int) -> None:
    """Takes the space of a file at once, so that a disk that is full shows before anything is written.

    Raises:
        OSError: there is less.
    """
    try:
        if nbytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, nbytes)
            return
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
    os.ftruncate(descriptor, nbytes)


def _reason(error: BaseException) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _free(path: str) -> str:
    """How many bytes this user may still take beside a file."""
    try:
        about = os.statvfs(os.path.dirname(path))
    except OSError as error:
        return f"an unknown number ({error.strerror})"
    return str(about.f_bavail * about.f_frsize)
