"""Checksums of files by chunks: several threads make them, and whoever reads a slice checks just its chunks."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.pool import AsyncResult, ThreadPool

from fzero.base import cores

CHUNK = 4 << 20  # bytes of a piece that have one checksum; its last chunk may be shorter
_MOST = 4  # threads: more than a disk needs


def workers() -> int:
    """How many threads make checksums."""
    return min(_MOST, cores.share())


def count(nbytes: int) -> int:
    """The number of a piece's chunks."""
    return -(-nbytes // CHUNK)


def digest(data: memoryview | bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()


def hashed(pieces: Iterable[memoryview], put: Callable[[memoryview], None], workers: int) -> Iterator[str]:
    """The checksum of each chunk of each piece, in order, made by some threads; it is written meanwhile."""
    under = collections.deque[AsyncResult[str]]()
    with ThreadPool(workers) as pool:  # an executor refuses jobs once the interpreter waits for the save to end
        for piece in pieces:
            for start in range(0, len(piece), CHUNK):
                chunk = piece[start : start + CHUNK]
                under.append(pool.apply_async(digest, (chunk,)))
                put(chunk)
                if len(under) > workers:
                    yield under.popleft().get()
        while under:
            yield under.popleft().get()
