"""Leaves that are cut over a tensor axis: each rank's slice of a whole leaf, and the whole of all ranks' slices."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.comm.linear import linear
from fzero.table.layout import Layout
from fzero.table.rows import Row
from fzero.table.slices import Slices

LARGE = 1 << 16  # elements of a vector whose state is cut, too
Piece = tuple[int, int]  # its start and its size along a dim


class Sliced(NamedTuple):
    """Where the slices of a leaf lie in it, each as some pieces along one dim, one after the other.

    Attributes:
        dim: of the leaf.
        pieces: rank -> its pieces in ascending order, none of them empty or continued by the next one.
    """

    dim: int
    pieces: tuple[tuple[Piece, ...], ...]

    def shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of a rank's slice."""
        return (*shape[: self.dim], sum(size for _, size in self.pieces[rank]), *shape[self.dim + 1 :])

    def keeps_blocks(self, shape: Sequence[int], size: int) -> bool:
        """Tells whether all elements of a block of `size` elements of the leaf are, in their order, one of a slice."""
        inner = math.prod(shape[self.dim + 1 :])
        edges = [edge for own in self.pieces for begin, count in own for edge in (begin, begin + count)]
        return all(edge * inner % size == 0 for edge in (*edges, shape[self.dim]))


def sliced_in(layout: Layout, leaf: int) -> Sliced | None:
    """How a leaf of a layout is cut; None where every rank of the tensor axis has all of it."""
    slices, ranks = layout.rows[leaf].slices, layout.tensor[1]
    if slices is None or ranks == 1:
        return None
    found = []
    for ranges in slices.ranges(ranks):
        own: list[Piece] = []
        for start, size in ranges:
            if own and sum(own[-1]) == start:
                own[-1] = own[-1][0], own[-1][1] + size
            elif size:
                own.append((start, size))
        found.append(tuple(own))
    return Sliced(slices.dim, tuple(found))


def in_order(ranges: Sequence[Sequence[Piece]], every: torch.Tensor, dim: int) -> torch.Tensor:
    """The whole of all ranks' slices, which lie one after the other.

    Args:
        ranges: rank -> the start and the size of its pieces along the dim.
    """
    own = [piece for of_rank in ranges for piece in of_rank]
    parts = every.split([size for _, size in own], dim)
    return torch.cat([parts[place] for place in sorted(range(len(own)), key=own.__getitem__)], dim)


def lies_in_slices(shape: Sequence[int]) -> bool:
    """Whether an optimizer on whole leaves keeps what it has in the shape of such a leaf in slices: of matrices.

    A matrix of one row or column is a vector, whose factors would be of its shape: slices are kept for all leaves.
    """
    return (len(shape) > 1 and min(shape[-2:]) > 1) or math.prod(shape) >= LARGE


def slice_of(row: Row, rank: int, ranks: int, full: torch.Tensor) -> torch.Tensor:
    """The slice of a whole leaf of a rank of that many; the leaf itself where it is not cut."""
    return full if row.slices is None else cut(row.slices, rank, ranks, full)


def cut(slices: Slices, rank: int, ranks: int, full: torch.Tensor, leading: int = 0) -> torch.Tensor:
    """A rank's pieces of a whole leaf, one after the other.

    Args:
        leading: dims before the leaf's own.
    """
    dim = slices.dim + leading
    return torch.cat([full.narrow(dim, start, size) for start, size in slices.ranges(ranks)[rank]], dim)


def whole_of(row: Row, axis: Axis, own: torch.Tensor, leading: int = 0) -> torch.Tensor:
    """The whole leaf, of this rank's slice and the others', as a differentiable function of this one.

    Args:
        leading: dims of the slice before the leaf's own.
    """
    over, slices = axis.tensor, row.slices
    if slices is None or over is None or over.size == 1:
        return own
    there = functools.partial(_joined, slices, over, leading, f"gather of leaf {row.path!r}")
    return linear(there, functools.partial(cut, slices, over.rank, over.size, leading=leading), own)


def _joined(slices: Slices, over: Axis, leading: int, tag: str, own: torch.Tensor) -> torch.Tensor:
    """The whole leaf of all ranks' pieces."""
    dim = slices.dim + leading
    every = pieces.gathered(over, own, dim, slices.sizes(over.size), tag)
    return every if len(slices.parts) == 1 else in_order(slices.ranges(over.size), every, dim)
