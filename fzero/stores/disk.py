"""A place on a local disk for state, as a value: which folder, and how bytes go there."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path

from fzero.base.arguments import need_bool, need_int, need_path


@dataclass(frozen=True, init=False)
class Disk:
    """A folder on a local disk that state is offloaded to, with `fz.offload(step, moments=fz.Disk(path))`.

    Each process keeps its files in a subfolder of its own. They are scratch: they go when the process ends. Other files
    in the folder stay untouched. For files that last, write checkpoints with `fz.save`.

    Args:
        path: the folder. It is made if it is missing, for this user alone.
        direct: bypass the page cache (O_DIRECT). None: where the filesystem allows it. True: always, or raise. False:
            never.
        threads: how many chunks of a tensor are read or written at once.
        verify: write a checksum with each chunk, and compare it when the chunk is read.
        in_flight: bytes that may be on their way to files, and so still in memory. A rank with more to write waits.

    Raises:
        TypeError: an argument of a wrong kind.
        ValueError: an empty path, or `threads` or `in_flight` below 1.
        OSError: the path is no folder that this user can write to.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     disk = Disk(folder, threads=2)
        >>> disk.threads
        2
    """

    path: str
    direct: bool | None = None
    threads: int = 4
    verify: bool = False
    in_flight: int = 64 << 20

    def __init__(
        self,
        path: str | os.PathLike[str],
        direct: bool | None = None,
        threads: int = 4,
        verify: bool = False,
        in_flight: int = 64 << 20,
    ) -> None:
        given = need_path(path, "fz.Disk")
        need_bool(direct, "fz.Disk", "direct", or_none=True)
        need_bool(verify, "fz.Disk", "verify")
        values = {
            "path": os.path.realpath(given),
            "direct": direct,
            "threads": need_int(threads, "fz.Disk", "threads", least=1),
            "in_flight": need_int(in_flight, "fz.Disk", "in_flight", least=1),
            "verify": verify,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        make_folder(self.path)

    def __repr__(self) -> str:
        given = [(field, getattr(self, field.name)) for field in fields(self)[1:]]
        return ", ".join([f"Disk({self.path!r}", *[f"{f.name}={x}" for f, x in given if x != f.default]]) + ")"


def stand_in() -> Disk:
    """A disk of no folder, for a table that nothing is put anywhere by."""
    disk = object.__new__(Disk)
    object.__setattr__(disk, "path", "(no folder)")
    return disk


def make_folder(path: str) -> None:
    """Makes a folder for this user alone, and its parents, where they are missing.

    Raises:
        OSError: of the kind that stands in the way, with what to do.
    """
    try:
        Path(path).mkdir(0o700, parents=True, exist_ok=True)
    except FileExistsError:
        said = f"fz.Disk: {path} is not a folder. Give the path of a folder, or of one to make."
        raise NotADirectoryError(said) from None
    except OSError as error:
        said = f"fz.Disk: cannot make the folder {path} ({error.strerror}). Give one that this user may write to."
        raise OSError(error.errno, said) from None
    as_now = os.access in os.supports_effective_ids  # not as the user who started the process
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=as_now):
        raise PermissionError(f"fz.Disk: this user cannot write to {path}. Give a folder that it may write to.")
