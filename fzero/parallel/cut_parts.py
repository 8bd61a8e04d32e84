"""Parts of a tensor that is cut, taken by an index or apart: the same of every rank's slice, or refused."""

from __future__ import annotations

import itertools

import torch

from fzero.parallel.cut_shapes import Given, Mixed
from fzero.parallel.own_size import OwnSize
from fzero.table.handle import Operands
from fzero.table.placements import Cut


def indexed(x: torch.Tensor, own: Cut, args: Operands, kwargs: Given, out: torch.Tensor) -> Cut:
    """x[index]"""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if any(
        not (each is None or each is ... or type(each) is int or isinstance(each, (slice, *_MANY))) for each in index
    ):
        raise Mixed
    dims = [_dims_of(each) for each in index]
    fill: list[object] = [slice(None)] * (x.ndim - sum(dims))
    at = next((place for place, each in enumerate(index) if each is ...), len(index))
    place, behind, by_many = 0, 0, False  # in x; dims of the result from the cut one on
    for each in (*index[:at], *fill, *index[at + 1 :]):
        here = place <= x.ndim + own.dim < place + _dims_of(each)
        by_many = by_many or isinstance(each, _MANY)
        if here and isinstance(each, slice) and each != slice(None):
            own = _between(own, x.shape[own.dim], each)
        elif isinstance(each, slice) and any(type(end) is OwnSize for end in (each.start, each.stop, each.step)):
            raise Mixed
        elif (here and not isinstance(each, slice)) or (behind and by_many and not isinstance(each, slice)):
            raise Mixed  # of places by tensors, which come before the cut dim, all dims stay from there on
        behind += (here or bool(behind)) and not isinstance(each, int)
        place += _dims_of(each)
    return own._replace(dim=-behind)


_MANY = (torch.Tensor, list)  # several places


def _dims_of(index: object) -> int:
    """Of the dims of a tensor, those that a part of an index is for."""
    if index is None or index is ...:
        return 0
    return index.ndim if isinstance(index, torch.Tensor) and index.dtype == torch.bool else 1


def _between(own: Cut, size: int, taken: slice) -> Cut:
    """The parts from one place on to another one; a number that all ranks say alike is no place in a slice."""
    said = taken.start in (None, 0) or type(taken.start) is OwnSize, taken.stop is None or type(taken.stop) is OwnSize
    if own.own is None or own.parts is None or own.outer > 1 or not all(said):
        raise Mixed
    start, stop, step = taken.indices(size)
    ends = [0, *itertools.accumulate(own.own)]
    if step != 1 or start not in ends or stop not in ends:
        raise Mixed
    return own._replace(parts=own.parts[ends.index(start) : ends.index(stop)])


def taken_apart(
    x: torch.Tensor, own: Cut, args: Operands, kwargs: Given, out: torch.Tensor, by_size: bool = False
) -> Cut | list[Cut]:
    """chunk(x, n, dim); `by_size`, split(x, size, dim)."""
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    many = next((kwargs[name] for name in _COUNTS if name in kwargs), args[1] if len(args) > 1 else None)
    if dim % x.ndim - x.ndim != own.dim:
        if any(type(each) is OwnSize for each in (many if isinstance(many, (tuple, list)) else [many])):
            raise Mixed
        return own
    if own.own is None or own.parts is None or own.outer > 1:
        raise Mixed
    count, size = len(own.parts), x.shape[own.dim]
    if isinstance(many, (tuple, list)):
        fits = by_size and tuple(many) == own.own
    else:  # the number of pieces, or their size, of which each rank has its own
        alike = len({*own.parts}) == 1 and many == (own.own[0] if by_size else count)
        fits = alike and out.shape[own.dim] * count == size and (type(many) is OwnSize) == by_size
    if not fits:
        raise Mixed
    return [own._replace(parts=(part,)) for part in own.parts]


_COUNTS = ("chunks", "split_size_or_sections", "split_size", "indices_or_sections", "sections")


def gated(x: torch.Tensor, own: Cut, args: Operands, kwargs: Given, out: torch.Tensor) -> Cut:
    """glu(x, dim)."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
    if dim % x.ndim - x.ndim != own.dim:
        return own
    if own.parts is None or own.outer > 1 or len(own.parts) != 2 or len({*own.parts}) != 1:
        raise Mixed
    return own._replace(parts=own.parts[:1])
