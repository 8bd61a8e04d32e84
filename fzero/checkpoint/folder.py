"""The folder of a checkpoint: what a save and a load ask of it, on a local disk or behind a URL."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from fzero.base.arguments import need_path

NAME = "manifest.json"
LOCK = "saving"  # there from before a save's first file until after its last
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")


class Folder(Protocol):
    """A folder that files are written to once, and read from at any place.

    What fails is an `OSError` that names the file.

    Attributes:
        path: of it, for errors.
        guarded: whether no second writer can begin inside of `only_writer`; otherwise the first one is told later.
    """

    path: str
    guarded: bool

    def child(self, name: str) -> Folder: ...

    def make(self) -> None:
        """Makes it and its parents, each of them durable."""
        ...

    def names(self) -> list[str]:
        """What lies in it; nothing where it is not there."""
        ...

    def folders(self) -> list[str]:
        """The folders that lie in it."""
        ...

    def exists(self, name: str = "") -> bool:
        """Whether a file is there, or the folder itself."""
        ...

    def size(self, name: str) -> int:
        """The bytes of a file."""
        ...

    def read(self, name: str) -> bytes:
        """A file's content."""
        ...

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        """Fills memory from a file; how many bytes there were, fewer where it ends before. From any thread."""
        ...

    def writing(self, name: str, nbytes: int) -> AbstractContextManager[Callable[[memoryview], None]]:
        """Makes a new file of so many bytes from what the function is given, durable at the end."""
        ...

    def replace(self, name: str, content: bytes) -> None:
        """Gives a file other content: at any time it has the old or the new one; durable when this returns."""
        ...

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        ...

    def only_writer(self, token: str) -> AbstractContextManager[Callable[[], None]]:
        """Around a save. The function raises where another run has begun to save there meanwhile.

        Raises:
            BlockingIOError: another run is saving there.
        """
        ...

    def discard(self, name: str) -> None:
        """Removes a folder in it, which is a whole checkpoint or none at any time."""
        ...

    def tidy(self) -> None:
        """Removes what was being discarded as a run was killed."""
        ...


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
