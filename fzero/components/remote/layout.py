"""How a tensor lies over ranks, and which block of which of them a reader needs: the map that reshards."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fzero.components.remote.digests import apart, unlike
from fzero.components.remote.failure import Failed, Failure, first_of, refused
from fzero.components.remote.link import Place
from fzero.components.remote.specs import Dims, axes_of
from fzero.components.remote.values import Box, Meta


class Layout(NamedTuple):
    """A tensor over ranks.

    Attributes:
        kind, dims: as of its pieces.
        lengths: of each dim those of its pieces, in order; of a dim that is whole its size alone.
        dtype, device: the device is where its parts lie.
        weights: of a mean, by pieces of what its weights depend on.
    """

    kind: str
    dims: Dims
    lengths: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: str = "cpu"
    weights: tuple[float, ...] = (1.0,)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sum, self.lengths))

    @property
    def axes(self) -> tuple[str, ...]:
        return axes_of(self.dims)

    def box(self, place: Place) -> Box | None:
        """Where the piece of a rank is in the whole; None where it is the whole."""
        if self.kind != "block" or not self.axes:
            return None
        numbers = [place.piece(names)[0] for names in self.dims]
        starts = [sum(own[:number]) for own, number in zip(self.lengths, numbers, strict=True)]
        return tuple([(a, a + own[i]) for a, own, i in zip(starts, self.lengths, numbers, strict=True)])


class Read(NamedTuple):
    """A box of one rank's piece, all of it where that is None, and where it goes in what is read."""

    rank: int
    box: Box | None
    to: Box


def layout_of(metas: Sequence[Meta | Failure], places: Sequence[Place], component: str) -> Layout:
    """The layout of a tensor of which these are the pieces of some ranks, of each piece one at least.

    Args:
        places: of these ranks.

    Raises:
        Failed: a part failed, or they do not fit together.
    """
    failures = [meta for meta in metas if isinstance(meta, Failure)]
    if failures:
        raise Failed(first_of(failures))
    parts = [meta for meta in metas if isinstance(meta, Meta)]
    first = parts[0]
    sized = first.kind != "mean"
    lengths: list[dict[int, int]] = [{} for _ in first.shape] if sized else []
    weights: dict[int, float] = {}
    for part, place in zip(parts, places, strict=True):
        ours, theirs = ((x.kind, x.dtype, x.dims, len(x.shape)) for x in (part, first))
        fits = ours == theirs
        for dim, own in enumerate(lengths if fits else ()):
            size = part.shape[dim]
            fits &= own.setdefault(place.piece(part.dims[dim])[0], size) == size
        if not fits:
            raise _apart(part, place, first, places[0], component)
        if not sized:
            weights[place.piece(axes_of(part.dims))[0]] = part.weight
    _need_alike(parts, places, component)
    by_piece = tuple([tuple([own[number] for number in sorted(own)]) for own in lengths])
    by_weight = tuple([weights[number] for number in sorted(weights)]) or (first.weight,)
    return Layout(first.kind, first.dims, by_piece, first.dtype, first.device, by_weight)


def _need_alike(parts: Sequence[Meta], places: Sequence[Place], component: str) -> None:
    """Refuses what differs between ranks that have the same piece: any one's would be taken."""
    own = []
    for part, place in zip(parts, places, strict=True):
        if part.digest is not None:
            copy = -1 if part.kind == "block" else place.mean_rank
            own.append(((copy, place.piece(axes_of(part.dims))[0]), part.digest))
    differs = apart(own)
    if differs is not None:
        what = f"a tensor of shape {parts[0].shape} and dtype {parts[0].dtype}"
        raise refused(unlike(component, what, differs[1]), component)


def _apart(part: Meta, place: Place, first: Meta, other: Place, component: str) -> Failed:
    """What is told of pieces that are none of one tensor."""
    where, there = ({name: rank for name, rank, _ in each.axes} for each in (place, other))
    return refused(
        f"component {component!r}: a tensor has shape {part.shape} and dtype {part.dtype} at {where}, and "
        f"{first.shape} and {first.dtype} at {there}; expected the same but for the dims along which pieces are "
        f"joined, {part.dims}, and there the same of all that share a piece. Let fn return what depends on what is cut "
        "in these dims only.",
        component,
        place.mean_rank,
    )


def share(total: int, index: int, count: int) -> tuple[int, int]:
    """The part that one of several ranks gets of a dim, as torch.tensor_split cuts it."""
    size, more = divmod(total, count)
    start = index * size + min(index, more)
    return start, start + size + (index < more)


def reads_of(
    layout: Layout, groups: Sequence[Sequence[Sequence[int]]], box: Box | None, choice: int
) -> list[list[Read]]:
    """What to read for a box of a tensor, or for all of it: for each block the terms of its sum.

    Args:
        groups: for each piece the ranks that have it: of each that means are taken over, it and its copies.
        choice: a number of the reader: of what several ranks have alike, readers take different ones.
    """
    pick = lambda ranks: ranks[choice % len(ranks)]
    if layout.kind == "mean":
        return [[Read(pick(ranks), None, ()) for ranks in same] for same in groups]
    box = tuple([(0, size) for size in layout.shape]) if box is None else box
    out = []
    pieces = itertools.product(*[_pieces(own) for own in layout.lengths])
    for piece, same in zip(pieces, groups, strict=True):
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(piece, box, strict=True)]
        if any(low >= high for low, high in both):
            continue
        own = _moved(both, piece)
        part = None if own == _moved(piece, piece) else own
        wanted = [pick(ranks) for ranks in same] if layout.kind == "added" else [pick([*itertools.chain(*same)])]
        out.append([Read(rank, part, _moved(both, box)) for rank in wanted])
    return out


def _pieces(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """From where to where each piece of a dim goes."""
    ends = [*itertools.accumulate(lengths)]
    return [(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def _moved(box: Sequence[tuple[int, int]], within: Sequence[tuple[int, int]]) -> Box:
    """A box as counted from the beginning of another."""
    return tuple([(a - start, b - start) for (a, b), (start, _) in zip(box, within, strict=True)])


def joined(layout: Layout, box: Box | None, blocks: Sequence[Sequence[tuple[Read, torch.Tensor]]]) -> torch.Tensor:
    """The tensor, or a box of it, of the parts that `reads_of` names."""
    if layout.kind == "mean":
        wide = torch.complex128 if layout.dtype.is_complex else torch.float64
        pairs = [(part, weight) for own, weight in zip(blocks, layout.weights, strict=True) for _, part in own]
        terms = [part.to(wide) * weight for part, weight in pairs]
        return _added(terms).to(layout.dtype)
    shape = layout.shape if box is None else tuple([stop - start for start, stop in box])
    sums = [(own[0][0].to, _added([part for _, part in own])) for own in blocks]
    if len(sums) == 1 and sums[0][1].shape == shape:
        return sums[0][1]
    device = sums[0][1].device if sums else "cpu"
    out = torch.empty(shape, dtype=layout.dtype, device=device)
    for to, block in sums:
        out[tuple([slice(start, stop) for start, stop in to])] = block
    return out


def _added(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their sum, in rank order."""
    return functools.reduce(torch.add, terms)
