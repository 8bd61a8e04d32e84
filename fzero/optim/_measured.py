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
    squares: list[Squares] | None, params: Sharded, key: Key, moments: Sequence[str]
) -> Iterator[Measure | None]:
    """Around the update of a group: what is to be summed up meanwhile, if anything is.

    Args:
        moments: the names of the moments, in the order of the formula's.
    """
    if squares is None:
        yield None
        return
    pieces, names = params.layout.pieces(key, params.rank_of(key)), ("params", "updates", *moments)
    device = params.placed(key).device
    sums = torch.zeros(len(pieces) + 1, len(names), dtype=torch.float64, device=device)
    yield Measure([piece[1:] for piece in pieces], sums)
    squares.append(Squares([slot.leaf for slot, _, _ in pieces], names, sums[:-1]))
