"""What an update of params is given besides: where its random bits begin."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fzero.formats.bits import _GOLDEN, Counters, Scattered, _signed, first_of
from fzero.formats.formats import ALIGN
from fzero.state.sliced import Sliced, sliced_in
from fzero.table.layout import Key, Layout


@dataclass(frozen=True)
class Draw:
    """The origin of the random bits of one update, the units in which its kernels are to be compiled."""

    seed: int
    count: int
    compiled: frozenset[str] = frozenset()

    def counters(self, layout: Layout, key: Key, rank: int) -> Counters:
        """The counters of rank's shard of a group: those of whole leaves, also where it has slices of them."""
        low, count = rank * layout.shard_numel(key), layout.shard_numel(key) // ALIGN
        runs, scattered, end = list[tuple[int, int, int]](), list[Scattered](), 0
        for slot, start, stop in layout.pieces(key, rank):
            if start >= stop:
                continue
            own = first_of(self.seed, self.count, slot.path)
            first, end = low + start - slot.offset, -(-stop // ALIGN)
            cut, shape, number = sliced_in(layout, slot.leaf), layout.rows[slot.leaf].shape, layout.tensor[0]
            if cut is None:
                runs.append((start // ALIGN, _signed(first // ALIGN * _GOLDEN + own), _GOLDEN))
            elif cut.keeps_blocks(shape, ALIGN):
                for at, place, _ in cut.runs(shape, number, first, first + stop - start):
                    block = (start + at - first) // ALIGN
                    runs.append((block, _signed(place // ALIGN * _GOLDEN + own), _GOLDEN))
            else:
                places = functools.partial(_places, cut, shape, number, first)
                scattered.append(Scattered(start, stop, own, places))
                runs.append((start // ALIGN, 0, 0))
        if end < count:
            runs.append((end, 0, 0))
        return Counters(tuple(runs), count, tuple(scattered))


def _places(cut: Sliced, shape: Sequence[int], rank: int, first: int, low: int, high: int) -> torch.Tensor:
    return cut.positions(shape, rank, first + low, first + high)
