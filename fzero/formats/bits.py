"""Random bits for rounding, from a counter: (seed, update, leaf path, offset in the leaf or in a tensor rank's slice).

So rounding is the same for every cut of buffers, chunking and restart. The hash is Wellons' lowbias32 (2018).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from fzero.base.random import Later
from fzero.formats.formats import ALIGN
from fzero.formats.ops import TorchOps

Shift = Callable[[torch.Tensor, int], torch.Tensor]  # to the right, logically
_GOLDEN, _STREAM = 0x9E3779B9 - (1 << 32), 0x632BE5AB


@dataclass(frozen=True)
class Counters:
    """The counters of a buffer's blocks of 64 elements, in runs that rise evenly.

    Attributes:
        runs: (first block, its counter, what every next one adds); the padding behind the last leaf counts nothing.
        count: blocks.
    """

    runs: tuple[tuple[int, int, int], ...] = ()
    count: int = 0

    def keys(self, device: torch.device | str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """int32[blocks], what the random bits of the elements from start to stop, multiples of 64, are drawn by."""
        if not self.count:
            return torch.empty(0, dtype=torch.int32, device=device)
        begin, end = start // ALIGN, self.count if stop is None else stop // ALIGN
        out = torch.arange(begin, max(begin, min(end, self.count)), dtype=torch.int32, device=device)
        if len(self.runs) == 1:
            ((first, counter, rise),) = self.runs
            return out.sub_(first).mul_(rise).add_(counter)
        table = self.table.to(device)
        run = torch.searchsorted(table[:, 0].contiguous(), out, right=True).sub_(1)
        return out.sub_(table[run, 0]).mul_(table[run, 2]).add_(table[run, 1])

    def cut(self, start: int, stop: int) -> Counters:
        """Those of a part of the buffer, from start to stop: multiples of 64."""
        begin, end = start // ALIGN, min(stop // ALIGN, self.count)
        before = [own for own in self.runs if own[0] <= begin]
        runs = [(0, _signed(at + (begin - first) * rise), rise) for first, at, rise in before[-1:]]
        runs += [(first - begin, at, rise) for first, at, rise in self.runs if begin < first < end]
        return Counters(tuple(runs), max(0, end - begin))

    @cached_property
    def table(self) -> torch.Tensor:
        """int32[runs + 1, 3], with an end that no block reaches: what a kernel counts by."""
        return torch.tensor([*self.runs, (2**31 - 1, 0, 0)], dtype=torch.int32, device="cpu")


def first_of(seed: int, count: int, path: str) -> int:
    """The counter of a leaf's first block."""
    if isinstance(count, torch.Tensor) or isinstance(seed, (torch.Tensor, Later)):
        raise ValueError(
            "jit: the function's update draws random numbers by a count or a seed (fz.gradient_noise, fz.whole, Muon "
            "with stochastic rounding) whose value a function's graph does not have. Take fz.jit(step)."
        )
    said = f"{seed} {count} {path}".encode()
    return int.from_bytes(hashlib.blake2b(said, digest_size=4).digest(), "little", signed=True)


def counters_of(first: int, numel: int) -> Counters:
    """The counters of a whole leaf."""
    return Counters(((0, first, _GOLDEN),), -(-numel // ALIGN))


def _signed(x: int) -> int:
    """The lower 32 bits as a signed number."""
    return (x + (1 << 31)) % (1 << 32) - (1 << 31)


LANES = [_signed(lane * _GOLDEN) for lane in range(ALIGN)]  # what each lane of a block adds to its hashed counter


def drawn_by(keys: torch.Tensor) -> torch.Tensor:
    """int32[blocks, 64], the sum of a block's hashed counter and of its lane's share, for every element."""
    return hashed(keys.view(-1, 1), TorchOps.shift) + torch.tensor(LANES, dtype=torch.int32, device=keys.device)


def word(block: torch.Tensor, lane: torch.Tensor | int, stream: int, shift: Shift) -> torch.Tensor:
    """32 random bits for lane 0 to 63 of a block, an int32; streams are independent.

    Args:
        block: the block's counter, hashed.
        shift: `shift(x, n)`, the logical shift to the right.
    """
    return _mixed(block + lane * _GOLDEN + _signed(stream * _STREAM), shift)


def hashed(x: torch.Tensor, shift: Shift) -> torch.Tensor:
    """lowbias32 of int32 counters."""
    x = _mixed(x ^ shift(x, 16), shift)
    return x ^ shift(x, 16)


def _mixed(x: torch.Tensor, shift: Shift) -> torch.Tensor:
    """The middle of lowbias32: enough for what is random already, but for a counter."""
    x = x * 0x7FEB352D
    x = x ^ shift(x, 15)
    return x * (0x846CA68B - (1 << 32))


def normal(keys: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """float64[blocks, 64] of the standard normal distribution (Box & Muller 1958), at most 6.8 from zero.

    Args:
        own: an int32, which makes others of the same keys.
    """
    block = hashed(drawn_by(keys) ^ own, TorchOps.shift)
    length, angle = [(word(block, 0, i, TorchOps.shift).double() + (2.0**31 + 0.5)) / 2.0**32 for i in range(2)]
    return (-2 * length.log()).sqrt() * (2 * math.pi * angle).cos()


class Fields:
    """Random integers as fields of a counter's words: every backend must take them alike.

    Args:
        read: `read(number)`, a word of 32 random bits for every element.
        shift: the logical shift to the right.
    """

    def __init__(self, read: Callable[[int], torch.Tensor], shift: Shift) -> None:
        self._read, self._shift = read, shift
        self._number, self._free = -1, 0

    def __call__(self, count: int, own: int | None = None) -> torch.Tensor:
        """Integers in [0, 2**count), each as likely.

        Args:
            own: how many of their upper bits no other field has; all by default. What those below decide is so rare
                that two fields may share them.
        """
        own = count if own is None else own
        ends = [32, *range(31, own - 1, -1)]  # at either end of its word a field takes one operation
        if count >= 16:
            ends.insert(0, count)  # short ones come from the upper bits, which are the most random
        end = next((end for end in ends if not _ones(own, end) & ~self._free), None)
        if end is None:
            self._number, self._free, end = self._number + 1, _ones(32, 32), ends[0]
        self._free &= ~_ones(own, end)
        bits, down = self._read(self._number), end - count
        if down < 0:
            return (bits << -down) & _ones(count, count)
        bits = self._shift(bits, down) if down else bits
        return bits if end == 32 else bits & _ones(count, count)


def _ones(count: int, end: int) -> int:
    """So many bits below bit `end`."""
    return (1 << end) - (1 << end - count)
