"""An open file, past the page cache (O_DIRECT) where the filesystem lets it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import weakref
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_DIRECT: int = getattr(os, "O_DIRECT", 0)  # not everywhere


class Replaced(OSError):
    """A folder, a link or the like lies where a file was."""


class Handle:
    """A descriptor, and whether what goes through it must come in blocks."""

    def __init__(self, descriptor: int, direct: bool) -> None:
        self.descriptor, self.direct = descriptor, direct
        _open_here.add(self)

    def go_buffered(self) -> None:
        """From now on bytes go through the page cache; other threads may be reading and writing."""
        if self.direct:
            flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
            self.direct = False

    def close(self) -> None:
        _open_here.discard(self)
        os.close(self.descriptor)


_open_here: weakref.WeakSet[Handle] = weakref.WeakSet()


def _forked() -> None:
    """In a forked child: a file that the parent removes takes room on the disk as long as anybody has it open."""
    for handle in list(_open_here):
        handle.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Opener:
    """Opens the files of one folder, and remembers whether its filesystem takes O_DIRECT.

    Some refuse it as a file is opened, some at the first byte.
    """

    def __init__(self) -> None:
        self.refused = not _DIRECT

    def open(self, path: str, flags: int, direct: bool | None) -> Handle:
        """Opens a file; one that is made is this user's alone.

        Args:
            direct: as of `Disk`.

        Raises:
            Replaced: something else lies there.
            OSError: it cannot be opened, or O_DIRECT is refused where it is required.
        """
        if direct is False or (direct is None and self.refused):
            return Handle(_open(path, flags), False)
        if not _DIRECT:
            raise _required(path)
        try:
            return Handle(_open(path, flags | _DIRECT), True)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        if direct:
            raise _required(path)
        # the refused call may have made the file
        handle = Handle(_open(path, flags & ~os.O_EXCL), False)
        self.refused = True
        return handle

    def attempt(self, path: str, handle: Handle, direct: bool | None, call: Callable[[], T]) -> T:
        """Calls what reads or writes, and once more where EINVAL says that O_DIRECT is refused after all.

        Raises:
            OSError: anything else, or O_DIRECT is refused where it is required.
        """
        was_direct = handle.direct
        try:
            return call()
        except OSError as error:
            if error.errno != errno.EINVAL or not was_direct:
                raise
            if direct:
                raise _required(path) from None
        self.refused = True
        handle.go_buffered()
        return call()


def _open(path: str, flags: int) -> int:
    """The descriptor of a regular file; anything else, for which opening might wait, is refused."""
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if os.path.lexists(path) and not _is_file(os.lstat(path)):
            raise Replaced(error.errno, "something else lies there than a file") from None
        raise
    if _is_file(os.fstat(descriptor)):
        return descriptor
    os.close(descriptor)
    raise Replaced(errno.ENOENT, "something else lies there than a file")


def _is_file(about: os.stat_result) -> bool:
    return stat.S_ISREG(about.st_mode)


def _required(path: str) -> OSError:
    return OSError(
        errno.EINVAL, f"the filesystem of {os.path.dirname(path)} does not take O_DIRECT; leave out direct=True"
    )
