"""What an update of params is given besides: where its random bits begin."""

from __future__ import annotations

from dataclasses import dataclass

from fzero.formats.bits import _GOLDEN, Counters, _signed, first_of
from fzero.formats.formats import ALIGN
from fzero.table.layout import Key, Layout


@dataclass(frozen=True)
class Draw:
    """The origin of the random bits of one update, the units in which its kernels are to be compiled."""

    seed: int
    count: int
    compiled: frozenset[str] = frozenset()

    def counters(self, layout: Layout, key: Key, rank: int) -> Counters:
        """The counters of rank's shard of a group: those of whole leaves; of a tensor rank's slice its own ones."""
        low, count = rank * layout.shard_numel(key), layout.shard_numel(key) // ALIGN
        runs, end = list[tuple[int, int, int]](), 0
        for slot, start, stop in layout.pieces(key, rank):
            if start < stop:
                cut = layout.rows[slot.leaf].slices is not None and layout.tensor[1] > 1
                own = first_of(self.seed, self.count, f"{slot.path} {layout.tensor[0]}" if cut else slot.path)
                first, end = low + start - slot.offset, -(-stop // ALIGN)
                runs.append((start // ALIGN, _signed(first // ALIGN * _GOLDEN + own), _GOLDEN))
        if end < count:
            runs.append((end, 0, 0))
        return Counters(tuple(runs), count)
