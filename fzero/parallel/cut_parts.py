"""Parts of a tensor that is cut, taken by an index or apart: the same of every rank's slice, or refused."""

from __future__ import annotations

import itertools

import torch

from fzero.capture.handle import Operands
from fzero.capture.notes import Cut
from fzero.parallel.cut_shapes import Given, Mixed
from fzero.parallel.own_size import OwnSize


def indexed(x: torch.Tensor, own: Cut, args: Operands, kwargs: Given, out: torch.Tensor) -> Cut:
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if isinstance(args[1], torch.Tensor):  # examples or tokens
        gone = args[1].ndim if args[1].dtype == torch.bool else 1
        if gone > x.ndim + own.dim:
            raise Mixed
        return own
    if any(not (each is None or each is ... or type(each) is int or isinstance(each, slice)) for each in index):
        raise Mixed
    taken = sum(each is not None and each is not ... for each in index)
    fill = [slice(None)] * (x.ndim - taken)
    at = index.index(...) if ... in index else len(index)
    place, behind, parts = 0, 0, own.parts  # in x; dims of the result from the cut one on
    for each in (*index[:at], *fill, *index[at + 1 :]):
        here = each is not None and place == x.ndim + own.dim
        if here and isinstance(each, int):
            raise Mixed
        if here and isinstance(each, slice) and each != slice(None):
            parts = _between(own, x.shape[own.dim], each)
        elif isinstance(each, slice) and any(type(end) is OwnSize for end in (each.start, each.stop, each.step)):
            raise Mixed
        behind += (here or bool(behind)) and not isinstance(each, int)
        place += each is not None
    return Cut(-behind, parts, own.outer)


def _between(own: Cut, size: int, taken: slice) -> tuple[int, ...]:
    """The parts from one place on to another one; a number that all ranks say alike is no place in a slice."""
    said = taken.start in (None, 0) or type(taken.start) is OwnSize, taken.stop is None or type(taken.stop) is OwnSize
    if own.parts is None or own.outer > 1 or not all(said):
        raise Mixed
    start, stop, step = taken.indices(size)
    ends = [0, *itertools.accumulate(own.parts)]
    if step != 1 or start not in ends or stop not in ends:
        raise Mixed
    return own.parts[ends.index(start) : ends.index(stop)]


def taken_apart(
    x: torch.Tensor, own: Cut, args: Operands, kwargs: Given, out: torch.Tensor, by_size: bool = False
) -> Cut:
    """chunk(x, n, dim); `by_size`, split(x, size, dim)."""
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    many = next((kwargs[name] for name in _MANY if name in kwargs), args[1] if len(args) > 1 else None)
    if dim % x.ndim - x.ndim != own.dim:
        if any(type(each) is OwnSize for each in (many if isinstance(many, (tuple, list)) else [many])):
            raise Mixed
        return own
    if own.parts is None or own.outer > 1:
        raise Mixed
    count, size = len(own.parts), x.shape[own.dim]
    if isinstance(many, (tuple, list)):
        fits = by_size and tuple(many) == own.parts
    else:  # the number of pieces, or their size, of which each rank has its own
        alike = len(set(own.parts)) == 1 and many == (own.parts[0] if by_size else count)
        fits = alike and out.shape[own.dim] * count == size and (type(many) is OwnSize) == by_size
    if not fits:
        raise Mixed
    return Cut(own.dim, (out.shape[own.dim],))


_MANY = ("chunks", "split_size_or_sections", "split_size", "indices_or_sections", "sections")


def gated(x: torch.Tensor, own: Cut, args: Operands, kwargs: Given, out: torch.Tensor) -> Cut:
    """glu(x, dim)."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
    if dim % x.ndim - x.ndim != own.dim:
        return own
    if own.parts is None or own.outer > 1 or len(own.parts) != 2 or len({*own.parts}) != 1:
        raise Mixed
    return Cut(own.dim, own.parts[:1])
