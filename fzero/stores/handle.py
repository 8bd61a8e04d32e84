"""An open file, past the page cache (O_DIRECT) where the filesystem lets it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from typing import NamedTuple

_DIRECT: int = getattr(os, "O_DIRECT", 0)  # not everywhere


class Handle(NamedTuple):
    """A descriptor, and whether what goes through it must come in blocks."""

    descriptor: int
    direct: bool


def takes_direct(folder: str, block: int) -> bool:
    """Tells whether a filesystem takes O_DIRECT, by a block that is written there: some refuse only that."""
    if not _DIRECT:
        return False
    path = os.path.join(folder, "0.state.part")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | _DIRECT, 0o600)
        try:
            os.pwritev(descriptor, [mmap.mmap(-1, block)], 0)
        finally:
            os.close(descriptor)
    except OSError as error:  # others say what they are when state is written
        return error.errno != errno.EINVAL
    finally:
        with contextlib.suppress(OSError):  # a call that is refused may have made it
            os.unlink(path)
    return True


def open_file(path: str, flags: int, direct: bool | None, taken: bool) -> Handle:
    """Opens a file; one that is made is this user's alone.

    Args:
        direct: as of `Disk`.
        taken: whether the filesystem takes O_DIRECT.

    Raises:
        OSError: it cannot be opened, or O_DIRECT is refused where it is required.
    """
    if direct and not taken:
        where = os.path.dirname(path)
        raise OSError(errno.EINVAL, f"the filesystem of {where} does not take O_DIRECT; leave out direct=True")
    direct = taken and direct is not False
    return Handle(os.open(path, flags | _DIRECT if direct else flags, 0o600), direct)
