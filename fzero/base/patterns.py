"""One dialect of paths and patterns: fnmatch over dotted paths, alternatives separated by `|`."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence


def matches(pattern: str, path: str) -> bool:
    return any(fnmatch.fnmatchcase(path, part) for part in pattern.split("|"))


def unmatched(pattern: str, paths: Sequence[str]) -> list[str]:
    """The alternatives of a pattern that match no path: a typo in one would otherwise hide behind the others."""
    return [part for part in pattern.split("|") if not any(fnmatch.fnmatchcase(path, part) for path in paths)]


ROOT = ""  # the unit of leaves outside of any other
PATTERN = "a pattern over leaf paths, such as 'blocks.*'"


def also(pattern: str) -> str:
    """A pattern among the arguments of a transform, where it was said."""
    return "" if pattern == "*" else f", pattern={pattern!r}"


def unit_of(path: str, patterns: Sequence[str] | None) -> str:
    """The unit of a path: its shortest prefix that matches a pattern; without patterns, up to its first integer."""
    parts = path.split(".")
    for length in range(1, len(parts) + 1):
        prefix = ".".join(parts[:length])
        if patterns is None:
            if parts[length - 1].isdigit():
                return prefix
        elif any(fnmatch.fnmatchcase(prefix, pattern) for pattern in patterns):
            return prefix
    return ROOT
