"""Counts and bytes in words."""

from __future__ import annotations


def counted(count: int, word: str) -> str:
    """`1 leaf`, `2 leaves`."""
    many = "leaves" if word == "leaf" else f"{word}s"
    return f"{count:,} {word if count == 1 else many}"


def in_bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
