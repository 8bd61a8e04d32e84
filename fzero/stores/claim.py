"""Which process has which subfolder: a lock that ends with its holder, so that what killed ones leave can be told."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from fzero.stores.disk import make_folder

PATIENCE = 60.0  # seconds to wait for others that are just coming in, which may have much to remove
_LOCK = "lock"
_FOLDER = re.compile(r"fzero-\w{1,40}-\d+-[0-9a-f]{8}", re.ASCII)
_FILE = re.compile(r"\d+\.state(\.part)?", re.ASCII)
_NO_LOCKS = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)


class Claim:
    """This process's subfolder, whose lock it holds until `release`, or until it ends in any way."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock = path, lock

    def release(self) -> None:
        """Removes the subfolder."""
        _remove(self.path)
        fcntl.flock(self._lock, fcntl.LOCK_UN)  # also for what was forked
        os.close(self._lock)

    def forget(self) -> None:
        """In a forked child: leaves the lock to the parent."""
        with contextlib.suppress(OSError):
            os.close(self._lock)


def enter(folder: str, run: str) -> Claim:
    """Makes a subfolder for this process, where no other run has one; removes those of processes that are gone.

    What else lies in the folder stays as it is.

    Raises:
        RuntimeError: a process of another run has the folder.
        TimeoutError: others have been coming in for too long.
        OSError: the folder cannot be made, written to or locked.
    """
    make_folder(folder)
    with _alone(folder):
        for name in sorted(os.listdir(folder)):
            if _FOLDER.fullmatch(name):
                _look_at(Path(folder, name), run)
        said = re.sub(r"\W", "_", run, flags=re.ASCII)[:40] or "run"
        path = Path(folder, f"fzero-{said}-{os.getpid()}-{secrets.token_hex(4)}")
        try:
            os.mkdir(path, 0o700)
        except OSError as error:  # some say only then that they take no folders
            raise _unusable(folder, error) from None
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if not _try_lock(lock, path):
                raise AssertionError("a lock that was just made is held")
            started = datetime.now().astimezone().isoformat(" ", "seconds")
            os.write(lock, f"{run}\n{_who()}\n, which has it since {started}".encode())
        except BaseException as error:
            os.close(lock)
            _remove(path)
            if isinstance(error, OSError):
                raise _unusable(folder, error) from None
            raise
        return Claim(path, lock)


def _unusable(folder: str, error: OSError) -> OSError:
    said = f"fz.Disk: cannot make a folder with files in {folder} ({error.strerror}). Give one that takes them."
    return OSError(error.errno, said)


@contextlib.contextmanager
def _alone(folder: str) -> Iterator[None]:
    """Inside, no other process looks through this folder: its own lock is held, and leaves no file behind."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _unusable(folder, error) from None
    try:
        deadline = time.monotonic() + PATIENCE
        while not _try_lock(descriptor, folder):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"fz.Disk: another process has been looking through {folder} for {PATIENCE:.0f} seconds. Look "
                    "which one holds a lock on it (lsof, fuser), or give another folder."
                )
            time.sleep(0.01)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor too
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, path: str | Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise OSError(
            error.errno,
            f"fz.Disk: the filesystem of {path} has no locks ({error.strerror}), by which runs are kept apart. Give a "
            "folder on a local disk.",
        ) from None
    return True


def _look_at(path: Path, run: str) -> None:
    """Removes another process's subfolder if it is gone, and refuses it if it is of another run."""
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # killed before it made one, or about to be gone
        with contextlib.suppress(OSError):
            os.rmdir(path)
        return
    except NotADirectoryError:  # somebody's file
        return
    except PermissionError:
        raise RuntimeError(
            f"fz.Disk: {path.parent} has state of another user's run, {path.name}. Give another folder."
        ) from None
    try:
        if _try_lock(lock, path):
            _remove(path)
        elif os.fstat(lock).st_nlink:  # else it is just ending
            holder, who, since = [*os.pread(lock, 1 << 16, 0).decode(errors="replace").split("\n", 2), "", "", ""][:3]
            if holder != run and who != _who():
                raise RuntimeError(
                    f"fz.Disk: {path.parent} is in use by another run: {who or 'a process that does not say which'}"
                    f"{since} ({path.name}). Give each run a folder of its own, or wait until that one has ended. "
                    "State that was made before a fork is the parent's."
                )
    finally:
        os.close(lock)


def _who() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _remove(path: Path) -> None:
    """Removes a subfolder with the files that a process makes there, and nothing else: then it stays too."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        for name in [name for name in os.listdir(folder) if _FILE.fullmatch(name)] + [_LOCK]:  # that one last
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
    finally:
        os.close(folder)
    with contextlib.suppress(OSError):
        os.rmdir(path)
