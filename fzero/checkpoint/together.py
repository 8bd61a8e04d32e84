"""What a checkpoint of several components says of them, in a file that is written last."""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

from fzero.checkpoint.manifest import DamagedCheckpoint, readable
from fzero.checkpoint.remote import folder_at

NAME = "components.json"


class Together(NamedTuple):
    """Which checkpoints belong together.

    Attributes:
        slot: the subfolder that they are in, by their numbers.
        tokens: of each of them.
        extra: the caller's.
    """

    slot: str
    tokens: list[str]
    extra: Any


def together(slot: str, tokens: list[str], extra: object) -> bytes:
    """The file's content."""
    return _sealed(json.dumps([slot, tokens, extra], separators=(",", ":")).encode())


def read_together(folder: str) -> Together | None:
    """What a folder's file says; None where it has none.

    Raises:
        DamagedCheckpoint: it is not what was written.
    """
    path, there = f"{folder}/{NAME}", folder_at(folder)
    try:
        with readable(path):
            text = there.read(NAME)
    except FileNotFoundError:
        return None
    body = text.partition(b'"components": ')[2].removesuffix(b"}\n")
    if text != _sealed(body):
        raise DamagedCheckpoint(
            f"{path}: got {len(text)} bytes that are not those that were written: their checksum differs. Load an "
            "older checkpoint."
        )
    return Together(*json.loads(body))


def _sealed(body: bytes) -> bytes:
    """The body behind its checksum."""
    return f'{{"sha256": "{hashlib.sha256(body).hexdigest()}",\n"components": '.encode() + body + b"}\n"
