"""Files that are no longer wanted, kept for a while: to overwrite blocks is quicker than to free and allocate them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator


class Spares:
    """The freed files of one folder by their sizes, kept inside `reusing` only.

    `give` takes no lock, as it may run wherever a File is collected; so it looks once more whether it came too late.
    """

    def __init__(self) -> None:
        self._depth, self._lock = 0, threading.Lock()
        self._files: dict[int, list[str]] = {}

    @contextlib.contextmanager
    def reusing(self) -> Iterator[None]:
        """Keeps what is freed inside, on any thread; the outermost end, of all threads', frees what is left."""
        with self._lock:
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
            if not self._depth:
                self.clear()

    def give(self, path: str, nbytes: int) -> None:
        """Keeps a whole file that nobody wants, or removes it."""
        if not self._depth:
            return remove(path)
        self._files.setdefault(nbytes, []).append(path)
        if not self._depth:
            self.clear()

    def take(self, path: str, nbytes: int) -> bool:
        """Moves a freed file of this size to a path; False if there is none."""
        files = self._files.get(nbytes)
        try:
            if not files:
                return False
            os.rename(files.pop(), path)
        except (IndexError, OSError):  # another thread was first, or somebody has deleted it
            return False
        return True

    def clear(self) -> bool:
        """Removes what is kept; False if that is nothing."""
        some = False
        for files in list(self._files.values()):
            while files:
                with contextlib.suppress(IndexError):  # another thread was first
                    remove(files.pop())
                    some = True
        return some


def remove(path: str) -> None:
    """Removes a file, if it is there."""
    with contextlib.suppress(OSError):
        os.unlink(path)
