"""Frames: what lies between two processes as bytes.

A header, the rows of tensors (`tensors.py`), the message (both by `vocabulary.py`), then the bytes of the tensors that
do not lie in shared memory, one behind the other.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from fzero.channels.errors import BadMessage

MAX_TABLE = 2 << 20  # bytes of the table of tensors
MAX_TREE = 64 << 20  # bytes of a message without its tensors
MAX_INLINE = 64 << 30  # bytes of tensors in one message that do not lie in shared memory
MAX_DESCRIPTORS = 64  # new shared segments of one message; the kernel takes 253

MESSAGE, GOODBYE = 0, 1  # kinds

_MAGIC = b"fz\x02\n"
_HEADER = struct.Struct("<4sBBIIQ")  # magic, kind, descriptors, bytes of table, message and tensors
SIZE = _HEADER.size


class Header(NamedTuple):
    """What a frame says of itself."""

    kind: int
    descriptors: int
    table: int
    tree: int
    inline: int


def check(tree: bytes, table: bytes, inline: int) -> None:
    """Refuses what the other side would.

    Raises:
        ValueError: the message is too large.
    """
    for what, size, most in (
        ("without its tensors", len(tree), MAX_TREE),
        ("in its table of tensors", len(table), MAX_TABLE),
        ("of tensors outside of shared memory", inline, MAX_INLINE),
    ):
        if size > most:
            raise ValueError(
                f"connection.send: the message has {size} bytes {what}, expected at most {most}. Send it in parts."
            )


def head(kind: int, descriptors: int, table: bytes, tree: bytes, inline: int) -> bytes:
    """The header of a frame."""
    return _HEADER.pack(_MAGIC, kind, descriptors, len(table), len(tree), inline)


def parse(data: bytes) -> Header:
    """The header in the first bytes of a frame.

    Raises:
        BadMessage: it is none, or beyond a limit.
    """
    magic, kind, descriptors, table, tree, inline = _HEADER.unpack_from(data)
    if magic != _MAGIC or kind not in (MESSAGE, GOODBYE):
        raise BadMessage(f"a frame begins with {data!r}, which is no header")
    if descriptors > MAX_DESCRIPTORS or table > MAX_TABLE or tree > MAX_TREE or inline > MAX_INLINE:
        raise BadMessage(
            f"a frame of {table} bytes in its table, {tree} of message, {inline} of tensors and {descriptors} segments "
            f"is over a limit ({MAX_TABLE}, {MAX_TREE}, {MAX_INLINE}, {MAX_DESCRIPTORS})"
        )
    return Header(kind, descriptors, table, tree, inline)
