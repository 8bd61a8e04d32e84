"""The squares that an update in place adds up of its leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from fzero.kernels.onepass import Measure
from fzero.state.draw import Squares
from fzero.state.sharded import Sharded
from fzero.table.layout import Key


@contextlib.contextmanager
def measuring(
    squares: list[Squares] | None,
    params: Sharded,
    key: Key,
    names: Sequence[str],
    slots: slice = slice(None),
    start: int = 0,
) -> Iterator[Measure | None]:
    """Around the update of a group: what is to be summed up meanwhile, if anything is.

    Args:
        names: of the trees, in the order of what is measured.
        slots: which leaves of the group are updated, in buffers that begin at `start` of this rank's slice.
    """
    if squares is None:
        yield None
        return
    pieces = params.layout.pieces(key, params.rank_of(key))[slots]
    device = params.placed(key).device
    sums = torch.zeros(len(pieces) + 1, len(names), dtype=torch.float64, device=device)
    yield Measure([(low - start, high - start) for _, low, high in pieces], sums)
    squares.append(Squares([slot.leaf for slot, _, _ in pieces], names, sums[:-1]))
