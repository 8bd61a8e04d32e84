"""Slices of a leaf out of slices that are cut otherwise: by the whole leaf, of one leaf at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fzero.formats.formats import ALIGN, Format, decode, encode, entries
from fzero.state.sliced import Sliced, in_order, sliced_in
from fzero.state.source import Source
from fzero.table.layout import Layout, Slot


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
    ranks = range(len(old.pieces) if old is not None else 1)
    if first == last:
        for rank in ranks:
            source.read(slot.path, 0, 0, None, rank)  # who needs none of it takes part
        return
    alike = have.parts == form.parts and (form.group == 1 or keep_blocks(shape, old, new))
    slices = list[list[torch.Tensor]]()  # rank -> its parts, or its values
    for rank in ranks:
        count = math.prod(shape if old is None else old.shape(shape, rank))
        got = source.read(slot.path, 0, count, None, rank)
        if alike:
            slices.append([x[: entries(have, part, count)] for part, x in zip(have.parts, got, strict=True)])
        else:
            slices.append([decode(have, got, wide(form))[:count]])
    unit = ALIGN if alike and form.group > 1 else 1
    every = [part.every for part in form.parts] if alike else [1]
    own = [
        _cut_anew(shape, old, new, layout.tensor[0], unit, parts)[first // count : last // count]
        for count, parts in zip(every, zip(*slices, strict=True), strict=True)
    ]
    if not alike:
        values = own[0].new_zeros(-(-(last - first) // ALIGN) * ALIGN)
        values[: last - first] = own[0]
        own = encode(form, values)
    for target, value in zip(into, own, strict=True):
        target.copy_(value[: target.numel()])


def _cut_anew(
    shape: Sequence[int], old: Sliced | None, new: Sliced | None, rank: int, unit: int, slices: Sequence[torch.Tensor]
) -> torch.Tensor:
    """A rank's slice of the new cut, flat.

    Args:
        unit: elements that stay together, 1 or more: then all cuts must keep blocks of so many.
        slices: all that the old cut makes, flat, with the same number of entries for each unit.
    """
    last = max(cut.dim for cut in (old, new) if cut is not None)
    inner = math.prod(shape[last + 1 :])

    def in_units(cut: Sliced) -> Sliced:
        if cut.dim < last:
            return cut
        pieces = [[(start * inner // unit, size * inner // unit) for start, size in own] for own in cut.pieces]
        return Sliced(last, tuple(map(tuple, pieces)))

    blocks = *shape[:last], shape[last] * inner // unit
    count = sum(map(len, slices)) // math.prod(blocks)  # entries of a unit
    cut = Sliced(0, (((0, blocks[0]),),)) if old is None else in_units(old)
    parts = [x.view(*cut.shape(blocks, place), count) for place, x in enumerate(slices)]
    whole = in_order(cut.pieces, torch.cat(parts, cut.dim), cut.dim)
    return (whole if new is None else in_units(new).of(whole, rank)).reshape(-1)
