"""Slices of a leaf out of slices that are cut otherwise: any cut to any other, some rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from fzero.formats.formats import ALIGN, Format, decode, encode, entries
from fzero.state.sliced import Piece, Sliced, sliced_in
from fzero.state.source import Source
from fzero.table.layout import Layout, Slot

_AT_ONCE = 1 << 22  # elements

Read = Callable[[int, int, int], Sequence[torch.Tensor]]


class _Rows(NamedTuple):
    """A slice, seen as rows of columns.

    Attributes:
        shape: of the slice.
        rows: pieces of the leaf's first dim.
        dim: of the leaf, that columns are chosen along; 0 where there are all of them.
        columns: pieces of that dim.
    """

    shape: tuple[int, ...]
    rows: tuple[Piece, ...]
    dim: int
    columns: tuple[Piece, ...]

    @property
    def width(self) -> int:
        return math.prod(self.shape[1:])


class Regrouping:
    """From the slices of a leaf that one cut makes to one of those that another makes.

    Args:
        shape: of the leaf.
        old, new: the cuts; None of a whole leaf.
        rank: whose slice of the new cut is made.
        unit: elements that stay together, 1 or more: then all cuts must keep blocks of so many.
    """

    def __init__(self, shape: Sequence[int], old: Sliced | None, new: Sliced | None, rank: int, unit: int = 1) -> None:
        last = max(own.dim for own in (old, new) if own is not None)
        inner = math.prod(shape[last + 1 :])
        scaled = lambda size: size * inner // unit
        self._shape, self._unit = (*shape[:last], scaled(shape[last])), unit

        def rows(cut: Sliced | None, number: int) -> _Rows:
            everything = ((0, self._shape[0]),)
            if cut is None:
                return _Rows(self._shape, everything, 0, ())
            own = cut.pieces[number]
            if cut.dim == last:
                own = tuple([(scaled(start), scaled(size)) for start, size in own])
            shape = Sliced(cut.dim, (own,)).shape(self._shape, 0)
            return _Rows(shape, own, 0, ()) if cut.dim == 0 else _Rows(shape, everything, cut.dim, own)

        self._new = rows(new, rank)
        self._old = [rows(old, number) for number in range(len(old.pieces) if old is not None else 1)]

    def fill(self, out: Sequence[torch.Tensor], every: Sequence[int], start: int, stop: int, read: Read) -> None:
        """Fills flat tensors with elements [start, stop) of the new slice.

        Args:
            every: of each tensor, how many elements share an entry.
            start, stop: multiples of the unit.
            read: `read(rank, start, stop)`, the same tensors of elements [start, stop) of a rank's old slice.
        """
        unit, width = self._unit, self._new.width
        each = [unit // own for own in every]  # entries
        low, high = start // unit, stop // unit
        for first, place, count in self._ranges(low, high):
            blocks = [x.new_empty((count, *self._new.shape[1:], n)) for x, n in zip(out, each, strict=True)]
            for number, old in enumerate(self._old):
                self._lay_over(blocks, each, place, number, old, read)
            begin, end = max(low, first * width), min(high, (first + count) * width)
            for target, block, n in zip(out, blocks, each, strict=True):
                own = block.view(-1)[(begin - first * width) * n : (end - first * width) * n]
                target[(begin - low) * n : (end - low) * n].copy_(own)

    def _ranges(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """The rows that units [low, high) of the new slice lie in: first of it, the same of the leaf, how many."""
        width, at = self._new.width, 0
        most = max(1, _AT_ONCE // max(width * self._unit, 1))
        for begin, size in self._new.rows if low < high else ():
            top, end = max(low // width, at), min(-(-high // width), at + size)
            for first in range(top, end, most):
                yield first, begin + first - at, min(most, end - first)
            at += size

    def _lay_over(
        self, blocks: Sequence[torch.Tensor], each: Sequence[int], place: int, number: int, old: _Rows, read: Read
    ) -> None:
        """Copies what an old slice has of the leaf's rows from `place` on."""
        at = 0
        for begin, size in old.rows:
            low, high = max(begin, place), min(begin + size, place + len(blocks[0]))
            if low < high and old.width:
                bounds = [(at + row - begin) * old.width * self._unit for row in (low, high)]
                for block, got, n in zip(blocks, read(number, *bounds), each, strict=True):
                    source = got.view(high - low, *old.shape[1:], n)
                    _copy_columns(block[low - place : high - place], self._new, source, old)
            at += size


def _copy_columns(target: torch.Tensor, new: _Rows, source: torch.Tensor, old: _Rows) -> None:
    """Copies the columns that two slices have in common."""
    if new.dim == old.dim and new.dim:
        for to, place, size in _placed(new.columns):
            for at, begin, count in _placed(old.columns):
                low, high = max(place, begin), min(place + size, begin + count)
                if low < high:
                    own = target.narrow(new.dim, to + low - place, high - low)
                    own.copy_(source.narrow(old.dim, at + low - begin, high - low))
        return
    for to, place, size in _placed(new.columns) if new.dim else [(0, 0, target.shape[0])]:
        for at, begin, count in _placed(old.columns) if old.dim else [(0, 0, source.shape[0])]:
            own = target.narrow(new.dim, to, size).narrow(old.dim, begin, count)
            own.copy_(source.narrow(old.dim, at, count).narrow(new.dim, place, size))


def _placed(pieces: Sequence[Piece]) -> list[tuple[int, int, int]]:
    """Where each piece lies in its slice, where in the leaf, and its size."""
    out, at = list[tuple[int, int, int]](), 0
    for start, size in pieces:
        out.append((at, start, size))
        at += size
    return out


def wide(form: Format) -> torch.dtype:
    """The dtype that values are decoded to for a format."""
    return torch.float64 if form.parts[0].dtype == torch.float64 else torch.float32


def keep_blocks(shape: Sequence[int], *cuts: Sliced | None) -> bool:
    """Tells whether elements that share a scale stay together in all of these cuts."""
    last = max(cut.dim for cut in cuts if cut is not None)
    return math.prod(shape[last:]) % ALIGN == 0 and all(
        cut is None or cut.dim < last or cut.keeps_blocks(shape, ALIGN) for cut in cuts
    )


def regroup(
    form: Format,
    have: Format,
    layout: Layout,
    slot: Slot,
    source: Source,
    first: int,
    last: int,
    into: Sequence[torch.Tensor],
) -> None:
    """Fills the parts of elements [first, last) of this rank's slice of a leaf from slices that are cut otherwise."""
    old, new, shape = source.sliced(slot.path), sliced_in(layout, slot.leaf), layout.rows[slot.leaf].shape
    for rank in range(len(old.pieces) if old is not None else 1):
        source.read(slot.path, 0, 0, None, rank)  # who needs none of it takes part
    if have.parts == form.parts and (form.group == 1 or keep_blocks(shape, old, new)):

        def parts(rank: int, start: int, stop: int) -> Sequence[torch.Tensor]:
            got = source.read(slot.path, start, stop, None, rank)
            return [x[: entries(have, part, stop - start)] for part, x in zip(have.parts, got, strict=True)]

        regrouping = Regrouping(shape, old, new, layout.tensor[0], 1 if form.group == 1 else ALIGN)
        regrouping.fill(into, [part.every for part in form.parts], first, last, parts)
        return

    def values(rank: int, start: int, stop: int) -> Sequence[torch.Tensor]:
        low = start // ALIGN * ALIGN
        return [decode(have, source.read(slot.path, low, stop, None, rank), wide(form))[start - low : stop - low]]

    own = torch.zeros(-(-(last - first) // ALIGN) * ALIGN, dtype=wide(form), device=into[0].device)
    Regrouping(shape, old, new, layout.tensor[0]).fill([own], [1], first, last, values)
    for target, value in zip(into, encode(form, own), strict=True):
        target.copy_(value[: target.numel()])
