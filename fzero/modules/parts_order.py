"""The order of what is fused along a dim: part by part in the whole, and rank by rank where ranks have slices."""

from __future__ import annotations

import torch

from fzero.table.slices import Slices


def by_rank(x: torch.Tensor, dim: int, slices: Slices, ranks: int) -> torch.Tensor:
    """Elements of a whole dim in the order of ranks' slices."""
    if len(slices.parts) == 1:
        return x
    return torch.cat([x.narrow(dim, *piece) for own in slices.ranges(ranks) for piece in own], dim)


def in_order(x: torch.Tensor, dim: int, slices: Slices, ranks: int) -> torch.Tensor:
    """Ranks' slices of a dim, one after the other, in the order of the whole."""
    if len(slices.parts) == 1:
        return x
    starts, end = {}, 0
    for own in slices.ranges(ranks):
        for start, size in own:
            starts[start, size], end = end, end + size
    return torch.cat([x.narrow(dim, place, size) for (_, size), place in sorted(starts.items())], dim)
