"""What the random bits of one update come from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from fzero.formats.bits import _GOLDEN, Counters, _signed
from fzero.formats.formats import ALIGN
from fzero.table.layout import Key, Layout


@dataclass(frozen=True)
class Draw:
    """What the random bits of one update come from, and in which units its kernels are to be compiled."""

    seed: int
    count: int
    compiled: frozenset[str] = frozenset()

    def of_leaf(self, path: str) -> int:
        """A signed 32-bit number for a leaf."""
        said = f"{self.seed} {self.count} {path}".encode()
        return int.from_bytes(hashlib.blake2b(said, digest_size=4).digest(), "little", signed=True)

    def counters(self, layout: Layout, key: Key, rank: int) -> Counters:
        """Those of rank's shard of a group."""
        low, count = rank * layout.shard_numel(key), layout.shard_numel(key) // ALIGN
        runs, end = [], 0
        for slot, start, stop in layout.pieces(key, rank):
            if start < stop:
                number = (low + start - slot.offset) // ALIGN
                runs.append((start // ALIGN, _signed(number * _GOLDEN + self.of_leaf(slot.path)), _GOLDEN))
                end = -(-stop // ALIGN)
        if end < count:
            runs.append((end, 0, 0))
        return Counters(tuple(runs), count)
