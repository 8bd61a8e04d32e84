"""Frames: what lies between two processes as bytes.

A header of 32 bytes, the table of tensors (`tensors.py`), the message (`vocabulary.py`), then the bytes of the tensors
that do not lie in shared memory, one behind the other. Table and message are small; both have a checksum, which tells
a stream that has lost its step from one that has not. The bytes of tensors have none but that of TCP.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from fzero.channels.errors import BadMessage

MAX_TABLE = 2 << 20  # bytes of the table of tensors
MAX_TREE = 64 << 20  # bytes of a message without its tensors
MAX_INLINE = 64 << 30  # bytes of tensors in one message that do not lie in shared memory
MAX_DESCRIPTORS = 64  # new shared segments of one message; the kernel takes 253

MESSAGE, GOODBYE = 0, 1  # kinds

_MAGIC = b"fz\x01\n"
_HEADER = struct.Struct("<4sBBHIIQI")  # magic, kind, descriptors, 0, table, tree, inline, checksum of table and tree
_CHECK = struct.Struct("<I")
SIZE = _HEADER.size + _CHECK.size


class Header(NamedTuple):
    """What a frame says of itself."""

    kind: int
    descriptors: int
    table: int
    tree: int
    inline: int
    checksum: int


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
    checksum = zlib.crc32(tree, zlib.crc32(table))
    data = _HEADER.pack(_MAGIC, kind, descriptors, 0, len(table), len(tree), inline, checksum)
    return data + _CHECK.pack(zlib.crc32(data))


def parse(data: bytes) -> Header:
    """The header in the first bytes of a frame.

    Raises:
        BadMessage: it is none, or beyond a limit.
    """
    magic, kind, descriptors, zero, table, tree, inline, checksum = _HEADER.unpack_from(data)
    if magic != _MAGIC or _CHECK.unpack_from(data, _HEADER.size)[0] != zlib.crc32(data[: _HEADER.size]):
        raise BadMessage(f"a frame begins with {data!r}, which is no header")
    if kind not in (MESSAGE, GOODBYE) or zero:
        raise BadMessage(f"a frame of the unknown kind {kind}")
    if descriptors > MAX_DESCRIPTORS or table > MAX_TABLE or tree > MAX_TREE or inline > MAX_INLINE:
        raise BadMessage(
            f"a frame of {table} bytes in its table, {tree} of message, {inline} of tensors and {descriptors} segments "
            f"is over a limit ({MAX_TABLE}, {MAX_TREE}, {MAX_INLINE}, {MAX_DESCRIPTORS})"
        )
    return Header(kind, descriptors, table, tree, inline, checksum)


def need_intact(header: Header, table: bytes, tree: bytes) -> None:
    """Holds table and message against their checksum."""
    if zlib.crc32(tree, zlib.crc32(table)) != header.checksum:
        raise BadMessage("the checksum of a message is wrong")
