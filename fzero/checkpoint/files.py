"""A folder on a local disk: its path, the few calls that touch it, what makes them durable, and who may write there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator

from fzero.base.arguments import need_path

NAME = "manifest.json"
LOCK = "saving"  # there from before a save's first file until after its last
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")


def is_url(path: str) -> bool:
    """Whether a path names a filesystem of its own."""
    return "://" in path


def not_ours(path: str) -> FileExistsError:
    """The error of a save that finds somebody else's file where its lock goes."""
    return FileExistsError(
        f"{path}: got a file that no save has written. Saves need this name. Move the file elsewhere, or save into a "
        "folder of your own."
    )


def path_of(path: object, who: str) -> str:
    """The path of a folder that somebody gave: absolute, or a URL."""
    given = need_path(path, f"fz.{who}")
    if not isinstance(path, str) and _URL.match(given):
        raise ValueError(
            f"fz.{who}: got {path!r}, expected a URL as a str: a Path drops one of its slashes. For a folder of that "
            "name write ./ before it."
        )
    if given.startswith(("file:/", "local://")):
        local = given.partition(":")[2].removeprefix("//").removeprefix("localhost")
        if not local.startswith("/"):
            raise ValueError(
                f"fz.{who}: got {given!r}, expected the URL of an absolute path, such as file:///data/run."
            )
        given = local
    if not is_url(given):
        return os.path.abspath(given)
    if magic := sorted({*given} & {*"*?["}):
        raise ValueError(
            f"fz.{who}: got {given!r} with {magic[0]!r}, which its filesystem would take for a pattern. Give a URL "
            "without *, ? and [."
        )
    scheme, _, rest = given.partition("://")
    return f"{scheme}://{rest.rstrip('/')}"


_GOING = ".going-"  # before the name of a folder that is being removed
_AHEAD = 32 << 20  # bytes after which the disk begins to write: a sync then has less to wait for


def folder_of(path: object, who: str) -> str:
    """The local folder of a path that somebody gave."""
    if is_url(given := path_of(path, who)):
        raise ValueError(f"fz.{who}: got {given!r}, expected a folder that every rank reaches as a local path.")
    return given


class Folder:
    """A folder on a local disk, or on one that is mounted. `Remote` is one behind a URL.

    Files are written to once, and read from at any place. What fails is an `OSError` that names the file.

    Attributes:
        path: of it.
        guarded: whether no second writer can begin inside of `only_writer`; otherwise the first one is told later.
    """

    guarded = True

    def __init__(self, path: str) -> None:
        self.path = path

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name) if name else self.path

    def child(self, name: str) -> Folder:
        return Folder(self._at(name))

    def make(self) -> None:
        """Makes it and its parents, each of them durable."""
        parent = os.path.dirname(self.path)
        if not os.path.isdir(self.path):
            if parent and parent != self.path:
                Folder(parent).make()
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path)
            sync_folder(parent)
        if not os.path.isdir(self.path):
            raise NotADirectoryError(f"{self.path} is not a folder. Give the path of a folder, or of one to make.")

    def names(self) -> list[str]:
        """What lies in it; nothing if it is not there."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.listdir(self.path)
        return []

    def folders(self) -> list[str]:
        """The folders that lie in it."""
        return [name for name in self.names() if os.path.isdir(self._at(name))]

    def exists(self, name: str = "") -> bool:
        """Whether a file is there, or the folder itself."""
        return os.path.exists(self._at(name))

    def size(self, name: str) -> int:
        """The bytes of a file."""
        return os.stat(self._at(name)).st_size

    def read(self, name: str) -> bytes:
        try:
            with open(self._at(name), "rb") as file:
                return file.read()
        except NotADirectoryError as error:
            raise FileNotFoundError(error.errno, error.strerror, error.filename) from None

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        """Fills memory from a file; how many bytes there were, fewer if it ends before. From any thread."""
        descriptor = os.open(self._at(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            with naming(self._at(name)):
                return read_at(descriptor, offset, target)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def writing(self, name: str, nbytes: int) -> Iterator[Callable[[memoryview], None]]:
        """Makes a new file of so many bytes from what the function is given, durable at the end."""
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
        """Gives a file other content: at any time it has the old or the new one; durable when this returns."""
        with self.writing(f"{name}.new", len(content)) as put:
            put(memoryview(content))
        rename(self._at(f"{name}.new"), self._at(name))
        sync_folder(self.path)

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self._at(name))

    def discard(self, name: str) -> None:
        """Removes a folder in it, which is a whole checkpoint or none at any time; `tidy` then removes its files."""
        rename(self._at(name), self._at(f"{_GOING}{uuid.uuid4().hex[:8]}-{name}"))

    def tidy(self) -> None:
        """Removes what was being discarded as a run was killed."""
        sync_folder(self.path)
        for name in self.names():
            if name.startswith(_GOING) and os.path.islink(self._at(name)):
                self.remove(name)  # what it leads to is somebody else's
            elif name.startswith(_GOING):
                shutil.rmtree(self._at(name), ignore_errors=True)

    @contextlib.contextmanager
    def only_writer(self, token: str = "") -> Iterator[Callable[[], None]]:
        """Around a save: refuses a second one into the same folder, also of another process.

        The lock's file says that a save has begun: if there is one and no manifest, none has ever ended here. The
        function raises if another run has begun to save there meanwhile, which only a `Remote` folder lets it.

        Raises:
            BlockingIOError: another run is saving there.
        """
        path, there, descriptor = self._at(LOCK), False, -1
        try:
            while not there:
                if descriptor >= 0:  # its owner has removed it meanwhile
                    os.close(descriptor)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
                self._lock(descriptor, path)
                with contextlib.suppress(FileNotFoundError):
                    there = os.path.samestat(os.fstat(descriptor), os.stat(path))
            if not b"process ".startswith(os.pread(descriptor, 8, 0).rstrip(b"\0")):  # a crash may leave less of it
                raise not_ours(path)
            with naming(path):
                os.ftruncate(descriptor, 0)
                write(descriptor, memoryview(f"process {os.getpid()} on {socket.gethostname()}".encode()), 0)
                sync(descriptor)
            sync_folder(self.path)
            yield lambda: None
            self.remove(LOCK)
        finally:
            if descriptor >= 0:
                if there:  # closing alone would not: a process that was forked meanwhile has the file, too
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)

    def _lock(self, descriptor: int, path: str) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(descriptor, 200, 0).decode(errors="replace")
            raise BlockingIOError(
                f"{self.path}: another run is saving there ({who or 'which has not said who it is'}). Save into a "
                "folder of your own, or wait until it has ended."
            ) from None
        except OSError as error:  # of a filesystem without locks
            raise OSError(error.errno, f"cannot be locked ({error.strerror}); save elsewhere", path) from None


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
