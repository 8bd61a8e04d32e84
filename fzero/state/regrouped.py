"""Slices of a leaf out of slices that are cut otherwise: by the whole leaf, of one leaf at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fzero.formats.formats import ALIGN, Format, decode
from fzero.state.sliced import Sliced, in_order, sliced_in
from fzero.state.source import Source
from fzero.state.straight import codes_of
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
    parts = list[torch.Tensor]()
    for rank in ranks:
        own = shape if old is None else old.shape(shape, rank)
        count = math.prod(own)
        parts.append(decode(have, source.read(slot.path, 0, count, None, rank), wide(form))[:count].view(own))
    whole = parts[0] if old is None else in_order(old.pieces, torch.cat(parts, old.dim), old.dim)
    mine = whole if new is None else new.of(whole, layout.tensor[0])
    values = whole.new_zeros(-(-(last - first) // ALIGN) * ALIGN)
    values[: last - first] = mine.reshape(-1)[first:last]
    for target, value in zip(into, codes_of(form, values), strict=True):  # the same where blocks stay together
        target.copy_(value[: target.numel()])
