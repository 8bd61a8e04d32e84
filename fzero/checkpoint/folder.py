"""The path of a checkpoint's folder, on a local disk or behind a URL, and the names of files in it."""

from __future__ import annotations

import os
import re

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
