"""Where the slices of a leaf lie in it: which elements each rank of a tensor axis has, and in which order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
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

    def runs(self, shape: Sequence[int], rank: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The elements [start, stop) of a rank's slice, row by row, as ranges of the leaf.

        Yields:
            Where a range begins in the slice and where in the leaf, and its number of elements.
        """
        inner = math.prod(shape[self.dim + 1 :])
        own, whole = math.prod(self.shape(shape, rank)[self.dim :]), shape[self.dim] * inner
        for row in range(start // own, -(-stop // own)) if start < stop else ():
            at = row * own
            for begin, size in self.pieces[rank]:
                low, high = max(start, at), min(stop, at + size * inner)
                if low < high:
                    yield low, row * whole + begin * inner + low - at, high - low
                at += size * inner

    def positions(self, shape: Sequence[int], rank: int, start: int, stop: int) -> torch.Tensor:
        """int64[stop - start], the places in the leaf of elements [start, stop) of a rank's slice."""
        inner = math.prod(shape[self.dim + 1 :])
        own, whole = math.prod(self.shape(shape, rank)[self.dim :]), shape[self.dim] * inner
        if start >= stop:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        ends = [0, *itertools.accumulate(size * inner for _, size in self.pieces[rank])]
        rows = torch.arange(start // own, -(-stop // own), device="cpu").unsqueeze(1)
        bounds = (rows * own + torch.tensor(ends, device="cpu")).clamp_(start, stop)
        moves = [begin * inner - end for (begin, _), end in zip(self.pieces[rank], ends, strict=False)]
        moved = rows * (whole - own) + torch.tensor(moves, device="cpu")
        places = torch.arange(start, stop, device="cpu")
        return places.add_(torch.repeat_interleave(moved.view(-1), bounds.diff(dim=1).view(-1)))

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
