"""Random bits for rounding, from a counter: (seed, update, leaf path, offset in the leaf), never from buffers or ranks.

So rounding is the same for every sharding, chunking and restart. The hash is Wellons' lowbias32 (2018).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fzero._formats import TorchOps
from fzero._layout import ALIGN, Layout

_GOLDEN, _STREAM = 0x9E3779B9 - (1 << 32), 0x632BE5AB


@dataclass(frozen=True)
class Draw:
    """What the random bits of one update come from, and whether its kernels are to be compiled."""

    seed: int
    count: int
    compiles: bool = False

    def of_leaf(self, path: str) -> int:
        """A signed 32-bit number for a leaf."""
        said = f"{self.seed} {self.count} {path}".encode()
        return int.from_bytes(hashlib.blake2b(said, digest_size=4).digest(), "little", signed=True)

    def blocks(self, layout: Layout, key: str, rank: int, device: Any) -> torch.Tensor:
        """int32[shard / 64]: what every block of 64 elements of rank's shard of a group draws from."""
        out = torch.zeros(layout.shard_numel(key) // ALIGN, dtype=torch.int32, device=device)
        low = rank * layout.shard_numel(key)
        for slot, start, stop in layout.pieces(key, rank):
            if start < stop:
                first = (low + start - slot.offset) // ALIGN
                count = -(-(stop - start) // ALIGN)
                numbers = torch.arange(first, first + count, dtype=torch.int32, device=device)
                out[start // ALIGN : start // ALIGN + count] = numbers.mul_(_GOLDEN).add_(self.of_leaf(slot.path))
        return hashed(out, TorchOps.shift)


def hashed(x: Any, shift: Callable[[Any, int], Any]) -> Any:
    """lowbias32 of int32 numbers; `shift(x, n)` is the logical shift to the right."""
    x = x ^ shift(x, 16)
    x = x * 0x7FEB352D
    x = x ^ shift(x, 15)
    x = x * (0x846CA68B - (1 << 32))
    return x ^ shift(x, 16)


def counters(block: Any, lane: Any, stream: int) -> Any:
    """What is hashed for lane 0 to 63 of a block; streams are independent."""
    offset = (stream * _STREAM + (1 << 31)) % (1 << 32) - (1 << 31)  # as a signed number
    return block + lane * _GOLDEN + offset


class Fields:
    """Random integers as fields of a counter's words: every backend must take them alike.

    Args:
        read: `read(number)`, a word of 32 random bits for every element.
        shift: the logical shift to the right.
    """

    def __init__(self, read: Callable[[int], Any], shift: Callable[[Any, int], Any]) -> None:
        self._read, self._shift = read, shift
        self._number, self._used = -1, 32

    def __call__(self, count: int, place: int = 0) -> Any:
        """Integers in [0, 2**count), times 2**place."""
        if self._used + count > 32:
            self._number, self._used = self._number + 1, 0
        word, down = self._read(self._number), self._used - place
        self._used += count
        if down < 0:
            return (word << -down) & ((1 << count) - 1 << place)
        return (self._shift(word, down) if down else word) & ((1 << count) - 1 << place)
