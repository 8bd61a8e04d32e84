"""One tensor on its way to or from a file: chunks that several threads take in turn, and one end."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
import zlib
from typing import NamedTuple

import torch

from fzero.stores import blocks
from fzero.stores.blocks import Handle, Memory
from fzero.stores.disk import Disk
from fzero.stores.pool import Shared

_NOT_HERE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)  # a filesystem that cannot reserve space


class Content:
    """The bytes of one tensor in a file, whole or not yet.

    Attributes:
        what: it is, in words, for errors.
        path: of the whole file; one that is being written has another name, `part`.
        over: the file of as many bytes that it is written over, as that is quicker than to free and allocate blocks.
        sums: the checksum of each chunk, where the disk verifies.
        whole: whether it is written.
        dropped: whether nobody wants it any more.
    """

    def __init__(self, path: str, nbytes: int, what: str, disk: Disk, over: str | None = None) -> None:
        self.path, self.part, self.nbytes, self.what, self.disk = path, f"{path}.part", nbytes, what, disk
        self.over = over
        self.sums = [0] * math.ceil(nbytes / blocks.CHUNK) if disk.verify else []
        self.whole = self.dropped = False

    @property
    def room(self) -> int:
        """Bytes that the file takes."""
        return blocks.rounded(self.nbytes)

    def drop(self, shared: Shared) -> None:
        """Frees the file, maybe while it is being written or read. Takes no lock, as it may run anywhere.

        Names are removed in the order in which a write gives them, so that none is missed: what is removed is not
        renamed any more, and a part that is made afterwards its write removes, as it looks at `dropped` then.
        """
        if os.getpid() != shared.pid:  # a forked child's copy
            return
        self.dropped = True
        for path in (self.over, self.part, self.path):
            if path is not None:
                remove(path)


def remove(path: str) -> None:
    """Removes a file, if it is there."""
    with contextlib.suppress(OSError):
        os.unlink(path)


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
        self._shared = shared
        self._memory: Memory | None = Memory(tensor)
        self._running = max(1, min(content.disk.threads, math.ceil(self.nbytes / self.chunk)))
        self._next = 0
        self._handle: Handle | None = None
        self._lock, self._over = threading.Lock(), threading.Event()

    def open(self) -> Handle:
        """Opens the file; called once."""
        raise NotImplementedError

    def move(self, handle: Handle, memory: Memory, begin: int, end: int) -> None:
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
        self._over.wait()

    @property
    def ended(self) -> bool:
        return self._over.is_set()

    def _run(self) -> None:
        """What each thread does."""
        begin, memory = 0, self._memory
        assert memory is not None
        try:
            handle = self._opened()
            while (taken := self._take()) is not None:
                begin = taken
                self.move(handle, memory, begin, min(begin + self.chunk, self.nbytes))
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
            self._over.set()


# ---- into a file


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

    def move(self, handle: Handle, memory: Memory, begin: int, end: int) -> None:
        if self.content.sums:
            self.content.sums[begin // self.chunk] = zlib.crc32(memory.bytes[begin:end])
        blocks.write(handle, memory, begin, end)

    def complete(self) -> None:
        os.rename(self.content.part, self.content.path)
        self.content.whole = True
        self._shared.failing.clear()

    def let_go(self) -> None:
        if self.failure is not None:
            remove(self.content.part)
        if self.failure is None or self.content.dropped:
            self.source = None
        self._shared.room.give(self.nbytes)

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
        told = isinstance(cause, OSError) and cause.strerror
        said = (
            f"Writing {self.content.what} to {self.content.path} failed at byte {offset} of {self.nbytes}: "
            f"{told or f'{type(cause).__name__}: {cause}'}. {self.content.room} bytes are needed there, "
            f"{_free(self.content.path)} are free. The values are kept in memory, where later calls read them, and "
            "written as soon as they can be: make room, or give another folder, fz.Disk(path)."
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


def _free(path: str) -> str:
    """How many bytes this user may still take beside a file."""
    try:
        about = os.statvfs(os.path.dirname(path))
    except OSError as error:
        return f"an unknown number ({error.strerror})"
    return str(about.f_bavail * about.f_frsize)


# ---- out of one


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

    def move(self, handle: Handle, memory: Memory, begin: int, end: int) -> None:
        got, sums = 0, self.content.sums
        with contextlib.suppress(OSError):
            got = blocks.read(handle, memory, begin, end)
        if got < end - begin:
            got = blocks.read(handle, memory, begin, end)
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
