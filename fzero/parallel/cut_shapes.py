"""Where a dim that is cut lies in a tensor of another shape, or in a part of the tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero.parallel.own_size import OwnSize
from fzero.table.handle import Function, Operands
from fzero.table.placements import Cut


class Mixed(Exception):
    """An operation goes over the dim that is cut, or is not known to leave it alone."""


@dataclass(frozen=True, eq=False)
class Call:
    """A call of an operation, some of whose operands are cut.

    Attributes:
        func, args, kwargs: as it is written.
        x: its first argument.
        more: the others, in order.
        given: all of them by name.
        out: the tensor that it gives; the first of several; None before it has run.
        cut_of: how an operand is cut; None where it is whole.
    """

    func: Function
    args: Operands
    kwargs: Mapping[str, Any]
    x: Any
    more: Sequence[Any]
    given: Mapping[str, Any]
    out: Any
    cut_of: Callable[[object], Cut | None]

    @property
    def own(self) -> Cut:
        """How the first operand is cut."""
        own = self.cut_of(self.x)
        if own is None:
            raise Mixed
        return own

    @property
    def dim(self) -> int:
        """The dim of the first operand that is cut, from the end."""
        return self.own.dim

    def dim_of(self, x: object) -> int | None:
        own = self.cut_of(x)
        return None if own is None else own.dim


def sized(own: Cut, before: int, now: int) -> Cut:
    found = own.sized(before, now)
    if found is None:
        raise Mixed
    return found


# ---- other shapes


def reshaped(call: Call) -> Cut:
    """view(x, sizes): the slice may become one dim, the inner part of one, or several; the outermost is cut then."""
    own, more = call.own, call.more
    sizes = [*more[0]] if len(more) == 1 and isinstance(more[0], (tuple, list)) else [*more]
    if len(more) == 2 and isinstance(more[1], (tuple, list)):  # unflatten(dim, sizes)
        dim = more[0] % call.x.ndim
        sizes = [*call.x.shape[:dim], *more[1], *call.x.shape[dim + 1 :]]
    try:
        return _reshaped(call.x, own, sizes, call.out)
    except Mixed:
        if own.parts is None or len(own.parts) == 1 or len({*own.parts}) > 1:
            raise
    # a dim of its own for parts of one size: several slices that follow one another
    fused = own._replace(parts=own.parts[:1], outer=own.outer * len(own.parts))
    return _reshaped(call.x, fused, sizes, call.out)


def _reshaped(x: torch.Tensor, own: Cut, sizes: Sequence[Any], out: torch.Tensor) -> Cut:
    place = x.ndim + own.dim
    if len(sizes) != out.ndim or not all(isinstance(size, int) for size in sizes):
        raise Mixed  # a view of another dtype
    count = x.shape[place] // own.outer
    low = math.prod(x.shape[place + 1 :])  # elements from one of the slice to the next one
    high = low * count
    steps = [math.prod(out.shape[dim + 1 :]) for dim in range(out.ndim)]
    ends = [step * size for step, size in zip(steps, out.shape, strict=True)]
    outermost = [dim for dim in range(out.ndim) if ends[dim] == high]
    around = [dim for dim in range(out.ndim) if steps[dim] <= low and ends[dim] >= high and not ends[dim] % high]
    either = sorted({*outermost, *around})
    said = [dim for dim in either if type(sizes[dim]) is OwnSize] or [dim for dim in either if sizes[dim] == -1]
    found = said if len(said) == 1 else outermost or around
    if len(found) != 1:  # which of the dims of one element is it?
        raise Mixed
    (dim,) = found
    others = [size for each, size in enumerate(sizes) if each != dim]
    # a number that all ranks say alike is not the size of a slice, which would be left over for another dim
    if any(type(size) is OwnSize for size in others) or (-1 in others and dim not in said):
        raise Mixed
    outer = max(1, ends[dim] // high)
    return sized(own, count, out.shape[dim] // outer)._replace(dim=dim - out.ndim, outer=outer)


def flattened(call: Call) -> Cut:
    """flatten(x, start_dim, end_dim)."""
    x, own = call.x, call.own
    start, end = [call.given[name] % x.ndim - x.ndim for name in ("start_dim", "end_dim")]
    if own.dim > end:
        return own
    if own.dim < start:
        return own._replace(dim=own.dim + end - start)
    local = x.shape[own.dim] // own.outer
    outer = math.prod(x.shape[start + x.ndim : own.dim + x.ndim]) * own.outer
    size = local * math.prod(x.shape[own.dim + x.ndim + 1 : end + x.ndim + 1])
    return sized(own, local, size)._replace(dim=end, outer=outer)


def expanded(call: Call) -> int:
    """expand(x, sizes)."""
    sizes = call.given["sizes"]
    if any(type(size) is OwnSize and place - len(sizes) != call.dim for place, size in enumerate(sizes)):
        raise Mixed
    return call.dim


# ---- parts of a tensor


def indexed(call: Call) -> Cut:
    """x[index]."""
    x, own, index = call.x, call.own, call.more[0]
    index = index if isinstance(index, tuple) else (index,)
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


def taken_apart(call: Call) -> Cut | list[Cut]:
    """chunk(x, n, dim)."""
    return _taken_apart(call, by_size=False)


def split(call: Call) -> Cut | list[Cut]:
    """split(x, size, dim)."""
    return _taken_apart(call, by_size=True)


def _taken_apart(call: Call, by_size: bool) -> Cut | list[Cut]:
    x, own, many = call.x, call.own, call.given["many"]
    if call.given["dim"] % x.ndim - x.ndim != own.dim:
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
        fits = alike and call.out.shape[own.dim] * count == size and (type(many) is OwnSize) == by_size
    if not fits:
        raise Mixed
    return [own._replace(parts=(part,)) for part in own.parts]


def gated(call: Call) -> Cut:
    """glu(x, dim)."""
    own, ndim = call.own, call.x.ndim
    if call.given["dim"] % ndim - ndim != own.dim:
        return own
    if own.parts is None or own.outer > 1 or len(own.parts) != 2 or len({*own.parts}) != 1:
        raise Mixed
    return own._replace(parts=own.parts[:1])
