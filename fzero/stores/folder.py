"""One process's part of a Disk: a subfolder with its files, its threads, and an end to both."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable

import torch

from fzero.stores import claim
from fzero.stores.blocks import takes_direct
from fzero.stores.claim import Claim
from fzero.stores.disk import Disk
from fzero.stores.file import File
from fzero.stores.pool import Shared


class Folder:
    """One process's subfolder of a user's folder, and the threads that read and write in it.

    It lasts as long as anybody refers to it or to one of its files; then the subfolder is removed, as it is when the
    interpreter ends. What a process that is killed leaves there, the next one to open the user's folder removes.

    Args:
        path: of the user's folder.
        run: what tells this run from others; its ranks, and nobody else, share the user's folder.
    """

    def __init__(self, path: str, run: str) -> None:
        self._claim = claim.enter(path, run)
        self.path = self._claim.path
        self.shared = Shared(str(self.path), takes_direct(str(self.path)))
        self._numbers = itertools.count()
        weakref.finalize(self, _close, self._claim, self.shared)

    def start_write(self, source: torch.Tensor, what: str, disk: Disk, over: File | None = None) -> File:
        """Begins to write a contiguous CPU tensor to a file.

        Waits while more than the disk's `in_flight` bytes are on their way already.

        Args:
            source: not to be written to until `File.written` returns or `File.on_disk` is True; held until then.
            what: it is, in words, for errors: "moments of unit 'blocks.0'".
            disk: says how.
            over: a file of as many bytes that nobody reads any more, to be overwritten: that is quicker than to free
                and allocate blocks, and takes no more of the disk.
        """
        self.shared.need_own_process()
        assert over is None or over.nbytes == source.numel() * source.element_size()
        path, freed = str(self.path / f"{next(self._numbers)}.state"), over.give_away() if over is not None else None
        return File(path, source, what, disk, self.shared, self, freed)

    def forget(self) -> None:
        """In a forked child: the lock stays the parent's alone, so that it ends with it."""
        self._claim.forget()


def _close(own: Claim, shared: Shared) -> None:
    """Ends the threads and removes the subfolder, wherever the folder is collected, or as the interpreter ends."""
    if os.getpid() != shared.pid:
        return

    def close() -> None:
        shared.pool.close()
        own.release()

    if shared.pool.runs_here():  # it was in a cycle, which this thread came upon
        threading.Thread(target=close, name="fzero-disk-end").start()
    else:
        close()


# Ranks on threads, columns and steps must meet in one subfolder, although each has a Disk of its own: the one thing
# that is known to the whole process. It holds nothing alive.
_open: weakref.WeakValueDictionary[tuple[str, int], Folder] = weakref.WeakValueDictionary()
_lock = threading.RLock()


def folder_of(disk: Disk, run: Callable[[], str]) -> Folder:
    """The one open folder of this process for a path, opened where that is yet to be done.

    Args:
        disk: its path counts; how bytes travel is said anew for each file.
        run: gives what tells this run from others, the same on all of its ranks; called if the folder is opened,
            with a lock held for which other threads wait: it must not communicate with them.

    Raises:
        RuntimeError: another run has the folder.
        OSError: it cannot be used.
    """
    with _lock:
        key = os.path.realpath(disk.path), os.getpid()
        folder = _open.get(key)
        if folder is None:
            folder = _open[key] = Folder(key[0], run())
        return folder


def _forked() -> None:
    """In a forked child: a lock that no other thread holds, and nothing of the parent's."""
    global _lock
    _lock = threading.RLock()
    for folder in list(_open.values()):
        folder.forget()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
