"""A folder on a local disk: the few calls that touch it, what makes them durable, and who may write there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator

from fzero.checkpoint.folder import LOCK, is_url, not_ours, path_of

_GOING = ".going-"  # before the name of a folder that is being removed
_AHEAD = 32 << 20  # bytes after which the disk begins to write: a sync then has less to wait for


def folder_of(path: object, who: str) -> str:
    """The local folder of a path that somebody gave.

    Raises:
        ValueError: it is a URL.
    """
    if is_url(given := path_of(path, who)):
        raise ValueError(f"fz.{who}: got {given!r}, expected a folder that every rank reaches as a local path.")
    return given


class Local:
    """A folder on a local disk, or on one that is mounted."""

    guarded = True

    def __init__(self, path: str) -> None:
        self.path = path

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name) if name else self.path

    def child(self, name: str) -> Local:
        return Local(self._at(name))

    def make(self) -> None:
        make_folder(self.path)

    def names(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.listdir(self.path)
        return []

    def folders(self) -> list[str]:
        return [name for name in self.names() if os.path.isdir(self._at(name))]

    def exists(self, name: str = "") -> bool:
        return os.path.exists(self._at(name))

    def size(self, name: str) -> int:
        return os.stat(self._at(name)).st_size

    def read(self, name: str) -> bytes:
        try:
            with open(self._at(name), "rb") as file:
                return file.read()
        except NotADirectoryError as error:
            raise FileNotFoundError(error.errno, error.strerror, error.filename) from None

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        descriptor = os.open(self._at(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            with naming(self._at(name)):
                return read_at(descriptor, offset, target)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def writing(self, name: str, nbytes: int) -> Iterator[Callable[[memoryview], None]]:
        descriptor, offset, begun = create(self._at(name)), 0, 0

        def put(data: memoryview) -> None:
            nonlocal offset, begun
            with naming(self._at(name)):
                write(descriptor, data, offset)
            offset += len(data)
            if offset - begun >= _AHEAD and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, begun, offset - begun, os.POSIX_FADV_DONTNEED)
                begun = offset

        try:
            yield put
            with naming(self._at(name)):
                sync(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(self.path)

    def replace(self, name: str, content: bytes) -> None:
        replace_file(self.path, name, content)

    def remove(self, name: str) -> None:
        remove(self._at(name))

    @contextlib.contextmanager
    def only_writer(self, token: str) -> Iterator[Callable[[], None]]:
        with only_writer(self.path):
            yield lambda: None

    def discard(self, name: str) -> None:
        rename(self._at(name), self._at(f"{_GOING}{uuid.uuid4().hex[:8]}-{name}"))

    def tidy(self) -> None:
        sync_folder(self.path)
        for name in self.names():
            if name.startswith(_GOING) and os.path.islink(self._at(name)):
                remove(self._at(name))  # what it leads to is somebody else's
            elif name.startswith(_GOING):
                shutil.rmtree(self._at(name), ignore_errors=True)


def make_folder(path: str) -> None:
    """Makes a folder and its parents, each of them durable."""
    parent = os.path.dirname(path)
    if not os.path.isdir(path):
        if parent and parent != path:
            make_folder(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        sync_folder(parent)
    if not os.path.isdir(path):
        raise NotADirectoryError(f"{path} is not a folder. Give the path of a folder, or of one to make.")


def replace_file(folder: str, name: str, content: bytes) -> None:
    """A file whose content is the old one's or this, whatever happens meanwhile; durable when this returns."""
    new = os.path.join(folder, f"{name}.new")
    descriptor = create(new)
    try:
        with naming(new):
            write(descriptor, memoryview(content), 0)
            sync(descriptor)
    finally:
        os.close(descriptor)
    rename(new, os.path.join(folder, name))
    sync_folder(folder)


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Errors of what is done with a descriptor, which knows no path, name the file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, path) from None
        raise


def read_at(descriptor: int, offset: int, target: memoryview) -> int:
    """Fills memory from a file; how many bytes there were, fewer where it ends before."""
    done = 0
    while done < len(target) and (got := os.preadv(descriptor, [target[done:]], offset + done)):
        done += got
    return done


# ---- the operations: nothing else of a save touches the disk


def create(path: str) -> int:
    """The descriptor of a new file."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(descriptor, data, offset)
        data, offset = data[done:], offset + done


def sync(descriptor: int) -> None:
    os.fsync(descriptor)


def sync_folder(path: str) -> None:
    """Makes what was made, renamed and removed in a folder durable."""
    descriptor = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: str, new: str) -> None:
    os.rename(old, new)


def remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(path)


# ---- one writer at a time


@contextlib.contextmanager
def only_writer(folder: str) -> Iterator[None]:
    """Around a save: refuses a second one into the same folder, also of another process.

    The lock's file says that a save has begun: where there is one and no manifest, none has ever ended here.

    Raises:
        BlockingIOError: another run is saving there.
    """
    path, there = os.path.join(folder, LOCK), False
    descriptor = -1
    try:
        while not there:
            if descriptor >= 0:  # its owner has removed it meanwhile
                os.close(descriptor)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if not isinstance(error, BlockingIOError):  # of a filesystem without locks
                    raise OSError(error.errno, f"cannot be locked ({error.strerror}); save elsewhere", path) from None
                who = os.pread(descriptor, 200, 0).decode(errors="replace")
                raise BlockingIOError(
                    f"{folder}: another run is saving there ({who or 'which has not said who it is'}). Save into a "
                    "folder of your own, or wait until it has ended."
                ) from None
            with contextlib.suppress(FileNotFoundError):
                there = os.path.samestat(os.fstat(descriptor), os.stat(path))
        if not b"process ".startswith(os.pread(descriptor, 8, 0).rstrip(b"\0")):  # a crash may leave less of it
            raise not_ours(path)
        with naming(path):
            os.ftruncate(descriptor, 0)
            write(descriptor, memoryview(f"process {os.getpid()} on {socket.gethostname()}".encode()), 0)
            sync(descriptor)
        sync_folder(folder)
        yield
        remove(path)
    finally:
        if descriptor >= 0:
            if there:  # closing alone would not: a process that was forked meanwhile has the file, too
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
