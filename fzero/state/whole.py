"""Leaves that are cut over a tensor axis: this rank's slice of a whole leaf, and the whole of all ranks' slices."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.comm.linear import linear
from fzero.state.sliced import in_order
from fzero.table.rows import Row
from fzero.table.slices import Slices

LARGE = 1 << 16  # elements of a vector whose state is cut, too


def lies_in_slices(shape: Sequence[int]) -> bool:
    """Whether an optimizer on whole leaves keeps what it has in the shape of such a leaf in slices: of matrices.

    A matrix of one row or column is a vector, whose factors would be of its shape: slices are kept for all leaves.
    """
    return (len(shape) > 1 and min(shape[-2:]) > 1) or math.prod(shape) >= LARGE


def slice_of(row: Row, rank: int, ranks: int, full: torch.Tensor) -> torch.Tensor:
    """The slice of a whole leaf of a rank of that many; the leaf itself where it is not cut."""
    return full if row.slices is None else cut(row.slices, rank, ranks, 0, full)


def whole_of(row: Row, axis: Axis, own: torch.Tensor, leading: int = 0) -> torch.Tensor:
    """The whole leaf, of this rank's slice and the others', as a differentiable function of this one.

    Args:
        leading: dims of the slice before the leaf's own.
    """
    over = axis.tensor
    if row.slices is None or over is None or over.size == 1:
        return own
    there = functools.partial(joined, row.slices, over, leading, f"gather of leaf {row.path!r}")
    back = functools.partial(cut, row.slices, over.rank, over.size, leading)
    return linear(there, back, own)


def cut(slices: Slices, rank: int, ranks: int, leading: int, full: torch.Tensor) -> torch.Tensor:
    """A rank's pieces of a whole leaf, one after the other."""
    dim = slices.dim + leading
    return torch.cat([full.narrow(dim, start, size) for start, size in slices.ranges(ranks)[rank]], dim)


def joined(slices: Slices, over: Axis, leading: int, tag: str, own: torch.Tensor) -> torch.Tensor:
    """The whole leaf of all ranks' pieces."""
    dim = slices.dim + leading
    every = pieces.gathered(over, own, dim, slices.sizes(over.size), tag)
    return every if len(slices.parts) == 1 else in_order(slices.ranges(over.size), every, dim)
