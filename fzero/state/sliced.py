"""Where the slices of a leaf lie in it: which elements each rank of a tensor axis has, and in which order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fzero.table.layout import Layout
from fzero.table.slices import Slices

Piece = tuple[int, int]  # its start and its size along a dim


class Sliced(NamedTuple):
    """A leaf as slices along one dim, of which each is some pieces of it, one after the other.

    Attributes:
        dim: of the leaf.
        pieces: rank -> its pieces in ascending order, none of them empty or continued by the next one.
    """

    dim: int
    pieces: tuple[tuple[Piece, ...], ...]

    def shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of a rank's slice."""
        return (*shape[: self.dim], sum(size for _, size in self.pieces[rank]), *shape[self.dim + 1 :])

    def of(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's slice of a whole leaf, which may have further dims behind."""
        return torch.cat([whole.narrow(self.dim, start, size) for start, size in self.pieces[rank]], self.dim)

    def keeps_blocks(self, shape: Sequence[int], size: int) -> bool:
        """Tells whether all elements of a block of `size` elements of the leaf are, in their order, one of a slice."""
        inner = math.prod(shape[self.dim + 1 :])
        edges = [edge for own in self.pieces for begin, count in own for edge in (begin, begin + count)]
        return all(edge * inner % size == 0 for edge in (*edges, shape[self.dim]))


def in_order(pieces: Sequence[Sequence[Piece]], every: torch.Tensor, dim: int) -> torch.Tensor:
    """The whole of all ranks' slices, which lie one after the other.

    Args:
        pieces: rank -> the start and the size of its pieces along the dim.
    """
    own = [piece for rank_pieces in pieces for piece in rank_pieces]
    parts = every.split([size for _, size in own], dim)
    return torch.cat([parts[place] for place in sorted(range(len(own)), key=own.__getitem__)], dim)


def sliced(slices: Slices | None, ranks: int) -> Sliced | None:
    """How a leaf is cut over the ranks of a tensor axis; None where it is whole."""
    if slices is None or ranks == 1:
        return None
    pieces = []
    for ranges in slices.ranges(ranks):
        own: list[Piece] = []
        for start, size in ranges:
            if own and sum(own[-1]) == start:
                own[-1] = own[-1][0], own[-1][1] + size
            elif size:
                own.append((start, size))
        pieces.append(tuple(own))
    return Sliced(slices.dim, tuple(pieces))


def sliced_in(layout: Layout, leaf: int) -> Sliced | None:
    """How a leaf of a layout is cut; None where every rank of the tensor axis has all of it."""
    return sliced(layout.rows[leaf].slices, layout.tensor[1])
