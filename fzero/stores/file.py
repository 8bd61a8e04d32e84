"""The bytes of one flat tensor, on a disk or on their way there; a write that has failed is tried again."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from fzero.comm import hazards
from fzero.stores.away import donated_to
from fzero.stores.blocks import copy
from fzero.stores.disk import Disk
from fzero.stores.pool import Shared
from fzero.stores.transfer import Content, Read, Write


class File:
    """The bytes of one flat tensor, on a disk or on their way there; they do not change.

    The file is freed when nobody refers to this any more. `Folder.start_write` makes it.

    Attributes:
        nbytes: of the tensor; the file itself has whole blocks.
        path: where they lie when they are written.
    """

    def __init__(
        self,
        path: str,
        source: torch.Tensor,
        what: str,
        disk: Disk,
        shared: Shared,
        folder: object,
        over: str | None = None,
    ) -> None:
        self.nbytes, self.path = source.numel() * source.element_size(), Path(path)
        self._shared, self._folder = shared, folder  # which lasts as long as its files
        self._content = Content(path, self.nbytes, what, disk, over)
        self._lock, self._copying, self._told = threading.Lock(), threading.Lock(), False
        self._freed = weakref.finalize(self, self._content.drop, shared)
        self._freed.atexit = False  # the folder goes as a whole
        self._write = self._begin_write(source)

    @property
    def on_disk(self) -> bool:
        """Whether all is written, and the source is free."""
        return self._write.ended and self._write.failure is None and not self._copying.locked()

    def give_away(self) -> str | None:
        """Leaves its path on the disk to another File, and is not read again; None where it is not whole, and freed."""
        if not self._content.whole or self._freed.detach() is None:
            self._freed()
            return None
        self._content.dropped = True
        return self._content.path

    def written(self) -> None:
        """Waits until the bytes are on the way out of memory; the source may then be written to.

        Values that could not be written stay in memory. That is raised once; later calls try again first.

        Raises:
            OSError: they could not be written.
        """
        self._shared.need_own_process()
        self._finish_write(False)

    def _finish_write(self, again: bool) -> None:
        """Waits for the write; one that has failed is begun anew where that was told already, or `again`."""
        with self._lock:
            self._write.wait()
            source = self._write.source
            if (again or self._told) and self._write.failure is not None and source is not None:
                self._write = self._begin_write(source)
                self._write.wait()
            self._told = self._write.failure is not None
            self._write.check()
        with self._copying:  # a read that has begun with the source
            pass

    def tell(self) -> None:
        """Says why the values could not be written, if they still cannot.

        Raises:
            OSError: that is raised once, for all files of the folder, until one can be written again: whoever was told
                of one of a step's many files can then get at all that is in memory.
        """
        if self._write.ended and self._write.failure is not None:
            told = self._shared.failing.is_set()
            try:
                self._finish_write(again=True)
            except (OSError, RuntimeError):
                self._shared.failing.set()
                if not told:
                    raise

    def start_read(self, target: torch.Tensor) -> Callable[[], None]:
        """Begins to read into a contiguous CPU tensor of as many bytes; the result waits for the end.

        It may be called from any thread, once, several times or never, and raises RuntimeError if values are lost.

        Raises:
            OSError: as `tell`. Not while somebody overwrites a state that was donated: it would be lost, and the values
                are in memory.
        """
        assert target.numel() * target.element_size() == self.nbytes, "a file is read as it was written"
        self._shared.need_own_process()
        if not donated_to:
            self.tell()
        return hazards.arriving(target, self._begin_read)

    def _begin_write(self, source: torch.Tensor) -> Write:
        write = Write(self._content, source, self._shared)
        self._shared.room.take(self.nbytes, self._content.disk.in_flight)
        hazards.departing(write.start)
        return write

    def _begin_read(self, target: torch.Tensor) -> Callable[[], None]:
        with self._copying:
            source = self._write.source
            if source is not None:  # on its way, and still in memory
                copy(target.data_ptr(), source.data_ptr(), self.nbytes)
                return _done
        read = Read(self._content, target, self._shared)
        read.start()
        return functools.partial(self._finish, read)

    def _finish(self, read: Read) -> None:
        """Bound to the file, which is not freed while somebody may wait."""
        self._shared.need_own_process()
        read.finish()


def _done() -> None:
    """Waits for nothing."""
