"""Where built libraries are kept: a folder that nobody else can write to, each under the digest of its content.

What is loaded from there runs as this user. So every folder up the path belongs to this user or to root and is closed
to others, and a library whose content has another digest than its name says (a torn write, a changed byte) is not
loaded. Names appear by renaming, so that many ranks may build at once, and one that is killed leaves nothing whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_UNDER_WAY = "building-"
_ABANDONED = 3600.0  # seconds after which nobody is building any more: it takes a few
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_NO_ROOT = 65534  # what Linux shows for users that a user namespace has no number for


def folder() -> Path:
    """`fzero/kernels` in this user's cache folder (XDG_CACHE_HOME, or ~/.cache), made where it is missing.

    Raises:
        OSError: it cannot be made, or others could write to it.
    """
    said = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(said) if os.path.isabs(said) else Path.home() / ".cache"  # the standard ignores a relative one
    except RuntimeError as error:
        raise FileNotFoundError(f"this user has no home folder ({error})") from None
    path = closed(base / "fzero" / "kernels")
    about = os.lstat(path)
    if about.st_uid != os.geteuid() or about.st_mode & _OTHERS:
        raise PermissionError(f"{path} is not this user's alone; remove it")
    return path


def closed(path: Path) -> Path:
    """A folder as a path without symlinks, to which nobody but this user and root can put another; made if missing.

    Raises:
        OSError: a component cannot be made, or somebody else could exchange it.
    """
    if not path.is_absolute():
        raise FileNotFoundError(f"{path} is not absolute")
    path, owners = Path(os.path.realpath(path)), _owners()
    for folder in (*reversed(path.parents), path):
        with contextlib.suppress(FileExistsError):  # another rank was first
            if not os.path.lexists(folder):
                os.mkdir(folder, 0o700)
        about = os.lstat(folder)
        if about.st_uid not in owners:
            who = f"this user ({os.geteuid()}) or root"
            raise PermissionError(f"{folder} belongs to user {about.st_uid}, expected {who}")
        if not stat.S_ISDIR(about.st_mode):  # a link too, which has come since
            raise NotADirectoryError(f"{folder} is not a folder")
        if about.st_mode & stat.S_ISVTX:  # like /tmp, below which whatever has no number may be anybody's
            owners = {os.geteuid(), 0}
        elif about.st_mode & _OTHERS:
            mode = about.st_mode & 0o7777
            raise PermissionError(f"others can write to {folder} (mode {mode:o}); `chmod go-w {folder}`")
    return path


def _owners(map_file: str = "/proc/self/uid_map") -> set[int]:
    """Whose folders are trusted: this user's and root's.

    In a container that a user started root has no number of its own, but that of all who have none.
    """
    try:
        outside = [line.split()[1] for line in Path(map_file).read_text().splitlines()]
    except OSError:  # not Linux
        outside = ["0"]
    return {os.geteuid(), 0} if "0" in outside else {os.geteuid(), 0, _NO_ROOT}


def found(folder: Path, key: str) -> Iterator[Path]:
    """The libraries that are kept under a key, with the content that they had when they were built."""
    for path in sorted(folder.glob(f"{key}.*.so")):
        if _digest(path) == path.name.split(".")[1]:
            yield path


def keep(folder: Path, key: str, library: Path) -> Path:
    """Moves a whole library, built in a `scratch` of the folder, to its place."""
    library.chmod(0o600)
    return library.rename(folder / f"{key}.{_digest(library)}.so")


def _digest(path: Path) -> str:
    """SHA-256 of a file that nobody else can write; of anything else nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # nor wait for the writer of a pipe
    except OSError:
        return ""
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & _OTHERS:
            return ""
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A folder to build in; those that processes which were killed left behind are removed."""
    with tempfile.TemporaryDirectory(prefix=_UNDER_WAY, dir=folder) as own:
        now = os.lstat(own).st_mtime  # by the file system's clock
        for other in folder.glob(f"{_UNDER_WAY}*"):
            with contextlib.suppress(OSError):  # another rank was first
                if now - os.lstat(other).st_mtime > _ABANDONED:
                    shutil.rmtree(other, ignore_errors=True)
        yield Path(own)
