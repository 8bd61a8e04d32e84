"""A checkpoint's folder: the few calls that touch it, what makes them durable, and who may write there."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from fzero.base.arguments import need_path

CHUNK = 8 << 20  # bytes that are written while they are hashed
LOCK = "saving"  # there from before a save's first file until after its last


class Written(NamedTuple):
    """A file that is on the disk: its name in the folder, its size in bytes, its SHA-256."""

    name: str
    nbytes: int
    sha256: str


def folder_of(path: object, who: str) -> str:
    """The folder of a path that somebody gave."""
    return os.path.abspath(need_path(path, f"fz.{who}"))


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


def write_file(folder: str, name: str, pieces: Iterable[memoryview]) -> Written:
    """Writes a new file, hashed as it goes, durable when this returns."""
    digest, offset = hashlib.sha256(), 0
    descriptor = create(os.path.join(folder, name))
    try:
        with ThreadPoolExecutor(1, "fzero-save") as writer:  # the two take about as long
            for piece in pieces:
                for start in range(0, len(piece), CHUNK):
                    chunk = piece[start : start + CHUNK]
                    writing = writer.submit(write, descriptor, chunk, offset)
                    digest.update(chunk)
                    writing.result()
                    offset += len(chunk)
        sync(descriptor)
    finally:
        os.close(descriptor)
    sync_folder(folder)
    return Written(name, offset, digest.hexdigest())


def replace_file(folder: str, name: str, text: bytes) -> None:
    """A file whose content is the old one's or this, whatever happens meanwhile; durable when this returns."""
    new = f"{name}.new"
    write_file(folder, new, [memoryview(text)])
    rename(os.path.join(folder, new), os.path.join(folder, name))
    sync_folder(folder)


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
    path = os.path.join(folder, LOCK)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            who = os.pread(descriptor, 200, 0).decode(errors="replace")
            os.close(descriptor)
            raise BlockingIOError(
                f"{folder}: another run is saving there ({who or 'which has not said who it is'}). Save into a folder "
                "of your own, or wait until it has ended."
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                break
        os.close(descriptor)  # its owner has removed it meanwhile
    try:
        said = f"process {os.getpid()} on {socket.gethostname()}".encode()
        os.ftruncate(descriptor, 0)
        write(descriptor, memoryview(said), 0)
        sync(descriptor)
        sync_folder(folder)
        yield
        remove(path)
    finally:
        os.close(descriptor)
