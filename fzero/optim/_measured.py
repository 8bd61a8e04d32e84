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
    squares: list[Squares] | None, params: Sharded, key: Key, names: Sequence[str]
) -> Iterator[Measure | None]:
    """Around the update of a group: what is to be summed up meanwhile, if anything is.

    Args:
        names: of the trees, in the order of what is measured.
    """
    if squares is None:
        yield None
        return
    pieces = params.layout.pieces(key, params.rank_of(key))
    device = params.placed(key).device
    sums = torch.zeros(len(pieces) + 1, len(names), dtype=torch.float64, device=device)
    yield Measure([piece[1:] for piece in pieces], sums)
    squares.append(Squares([slot.leaf for slot, _, _ in pieces], names, sums[:-1]))
