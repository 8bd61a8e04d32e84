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
def measuring(squares: Squares | None, params: Sharded, key: Key, moments: Sequence[str]) -> Iterator[Measure | None]:
    """Around the update of a group: what is to be summed up meanwhile, if anything is.

    Args:
        moments: the names of the moments, in the order of the formula's.
    """
    if squares is None:
        yield None
        return
    pieces, names = params.layout.pieces(key, params.rank_of(key)), ("params", "updates", *moments)
    device = params.placed(key).device
    measure = Measure(
        [piece[1:] for piece in pieces], torch.zeros(len(pieces), len(names), dtype=torch.float64, device=device)
    )
    yield measure
    for (slot, _, _), sums in zip(pieces, measure.sums, strict=True):
        squares.add(slot.leaf, names, sums)
