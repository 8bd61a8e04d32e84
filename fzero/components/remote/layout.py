"""How a tensor lies over ranks: which piece of each input is a rank's, and which block of which rank a reader needs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fzero.base import pytree
from fzero.base.ragged import places_in
from fzero.components.remote.failure import Failed, Failure, first_of, refused
from fzero.components.remote.link import Place
from fzero.components.remote.specs import Dims, axes_of, dims_by_leaf, need_dims
from fzero.components.remote.values import Box, Meta, apart, unlike
from fzero.components.remote.wire import Skeleton, Slot, slots_of


class Layout(NamedTuple):
    """A tensor over ranks."""

    # kind, dims: as of its pieces
    kind: str
    dims: Dims
    # of each dim those of its pieces, in order; of a dim that is whole its size alone
    lengths: tuple[tuple[int, ...], ...]
    # dtype, device: the device is where its parts lie
    dtype: torch.dtype
    device: str = "cpu"
    weights: tuple[float, ...] = (1.0,)  # of a mean, by pieces of what its weights depend on

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


class Cut(NamedTuple):
    """How one tensor of the inputs is cut."""

    # for each dim the axes that it lies over; None where examples do in dim 0, of what has one
    dims: Dims | None = None
    lengths: int = -1  # the number of the tensor of lengths whose examples the rows are of; -1 of what is not ragged
    leads: bool = False  # whether it is such a tensor of lengths, which every rank is given whole

    def dims_of(self, place: Place, shape: Sequence[int], what: str) -> Dims:
        """The dims of a tensor of this shape."""
        own = ((place.batch,) if len(shape) else ()) if self.dims is None else self.dims
        return need_dims(own, shape, what)


def cuts_of(skeleton: Skeleton, count: int, in_specs: object) -> list[Cut]:
    """How each tensor of the inputs is cut, by the order of the leaves."""
    tree = slots_of(skeleton)
    cuts = [Cut()] * count
    if in_specs is not None:
        found = zip(pytree.flatten(tree)[0], dims_by_leaf(in_specs, tree, "in_specs", "inputs"), strict=True)
        for slot, dims in found:
            if isinstance(slot, Slot):
                cuts[slot.number] = Cut(dims)
    slots = pytree.flatten(tree)[0]
    for values, lengths in [(slots[one], slots[other]) for one, other in places_in(tree).items()]:
        if isinstance(values, Slot) and isinstance(lengths, Slot):
            cuts[values.number] = cuts[values.number]._replace(lengths=lengths.number)
            cuts[lengths.number] = cuts[lengths.number]._replace(leads=True)
    return cuts


def even_box(dims: Dims, shape: Sequence[int], place: Place) -> Box | None:
    """The piece of a rank; None of what it has whole."""
    if not any(dims):
        return None
    return tuple([share(size, *place.piece(names)) for size, names in zip(shape, dims, strict=True)])


def ragged_box(
    dims: Dims, over: tuple[str, ...], shape: Sequence[int], lengths: torch.Tensor, place: Place, what: str
) -> Box:
    """The rows of a rank's own examples; over further axes equal pieces of these.

    Args:
        over: the axes that the examples lie over.
        lengths: of all examples.
    """
    if not dims or dims[0][: len(over)] != over:
        raise ValueError(
            f"{what} has rows that lie over {dims[0] if dims else ()}, and the lengths of their examples lie over "
            f"{over}; expected the same axes first, as the rows of an example go where its length goes: "
            "fz.Ragged(values=PartitionSpec(('dp', 'sp')), lengths=PartitionSpec('dp'))."
        )
    sizes = lengths.tolist()
    if sum(sizes) != shape[0] or min(sizes, default=0) < 0:
        raise ValueError(
            f"{what} has shape {tuple(shape)} and examples of lengths {sizes}, which add up to {sum(sizes)}; expected "
            "lengths of at least 0 that add up to the number of rows."
        )
    first, last = share(len(sizes), *place.piece(over))
    start, rows = sum(sizes[:first]), sum(sizes[first:last])
    low, high = share(rows, *place.piece(dims[0][len(over) :]))
    others = even_box(dims[1:], shape[1:], place) or tuple([(0, size) for size in shape[1:]])
    return ((start + low, start + high), *others)


def need_lengths(lengths: torch.Tensor, what: str) -> None:
    """Refuses what cannot be the lengths of examples."""
    if lengths.ndim != 1 or lengths.dtype.is_floating_point or lengths.dtype.is_complex or lengths.dtype == torch.bool:
        raise ValueError(
            f"{what} are the lengths of ragged examples, of shape {tuple(lengths.shape)} and dtype {lengths.dtype}; "
            "expected ints, one for each example."
        )


class Totals:
    """The sizes of what lies over the same axes, which must be the same in all inputs."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._found: dict[tuple[str, ...], tuple[int, int, Sequence[int]]] = {}

    def need(self, number: int, dims: Dims, shape: Sequence[int]) -> None:
        """Refuses a tensor of another size than an earlier one."""
        for dim, names in enumerate(dims):
            other, place, like = self._found.setdefault(names, (number, dim, shape)) if names else (number, dim, shape)
            if shape[dim] != like[place]:
                raise ValueError(
                    f"{self._who}: dim {place} of tensor {other} of the inputs, of shape {tuple(like)}, and dim {dim} "
                    f"of tensor {number}, of shape {tuple(shape)}, both lie over {' and '.join(map(repr, names))}; "
                    "expected the same size. What belongs to no example must be 0-d, whole by in_specs, or built into "
                    "the function; rows of examples of different lengths are fz.Ragged(values, lengths)."
                )

    def shares(self, place: Place) -> dict[tuple[str, ...], tuple[int, int]]:
        """By axes how much of a dim that lies over them a rank has, and of how much."""
        out = {}
        for names, (number, dim, shape) in self._found.items():
            rank, ranks = place.piece(names)
            if 0 < shape[dim] < ranks and {*names} & {*place.averaged}:
                raise ValueError(
                    f"{self._who}: tensor {number} of the inputs has shape {tuple(shape)}, and its dim {dim} is split "
                    f"over {ranks} data ranks; expected a size of at least {ranks}. Give larger batches, or fewer "
                    "ranks."
                )
            start, stop = share(shape[dim], rank, ranks)
            out[names] = stop - start, shape[dim]
        return out
