"""Where a dim that is cut lies in a tensor of another shape, or with its dims in another order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero.parallel.own_size import OwnSize
from fzero.table.handle import Operands
from fzero.table.placements import Cut

Given = dict[str, Any]
DimOf = Callable[[object], int | None]  # the dim that is cut, from the end; None where none is, or it is not known


class Mixed(Exception):
    """An operation goes over the dim that is cut, or is not known to leave it alone."""


def sized(own: Cut, before: int, now: int) -> Cut:
    found = own.sized(before, now)
    if found is None:
        raise Mixed
    return found


def input_of(args: Operands, kwargs: Given) -> Any:
    return args[0] if args else kwargs.get("input")


def reshaped(x: torch.Tensor, own: Cut, args: Operands, kwargs: Given, out: torch.Tensor) -> Cut:
    """view(x, sizes): the slice may become one dim, the inner part of one, or several; the outermost is cut then."""
    try:
        return _reshaped(x, own, args, kwargs, out)
    except Mixed:
        if own.parts is None or len(own.parts) == 1 or len({*own.parts}) > 1:
            raise
    # a dim of its own for parts of one size: several slices that follow one another
    return _reshaped(x, own._replace(parts=own.parts[:1], outer=own.outer * len(own.parts)), args, kwargs, out)


def _reshaped(x: torch.Tensor, own: Cut, args: Operands, kwargs: Given, out: torch.Tensor) -> Cut:
    sizes, place = _sizes(args, kwargs), x.ndim + own.dim
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


def flattened(x: torch.Tensor, own: Cut, args: Operands, kwargs: Given, out: torch.Tensor) -> Cut:
    """flatten(x, start_dim, end_dim)."""
    given: Given = {"start_dim": 0, "end_dim": -1} | dict(zip(("start_dim", "end_dim"), args[1:], strict=False))
    given |= kwargs
    start, end = [given[name] % x.ndim - x.ndim for name in ("start_dim", "end_dim")]
    if own.dim > end:
        return own
    if own.dim < start:
        return own._replace(dim=own.dim + end - start)
    local = x.shape[own.dim] // own.outer
    outer = math.prod(x.shape[start + x.ndim : own.dim + x.ndim]) * own.outer
    size = local * math.prod(x.shape[own.dim + x.ndim + 1 : end + x.ndim + 1])
    return sized(own, local, size)._replace(dim=end, outer=outer)


def _sizes(args: Operands, kwargs: Given) -> list[Any]:
    """The sizes that a view is given."""
    more = [*args[1:], *kwargs.values()]
    if len(more) == 2 and isinstance(more[1], (tuple, list)):  # unflatten(dim, sizes)
        x = input_of(args, kwargs)
        dim = more[0] % x.ndim
        return [*x.shape[:dim], *more[1], *x.shape[dim + 1 :]]
    return [*more[0]] if len(more) == 1 and isinstance(more[0], (tuple, list)) else more


def moved(order: Callable[[Sequence[int], int], Sequence[int]]) -> Callable[..., int | None]:
    """Dims in another order, of which `order(arguments, ndim)` says where each comes from."""

    def rule(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
        x, dim = input_of(args, kwargs), dim_of(input_of(args, kwargs))
        if dim is None:
            return None
        more = [*args[1:], *kwargs.values()]
        return [*order(more, x.ndim)].index(x.ndim + dim) - int(x.ndim)

    return rule


def exchanged(given: Sequence[int], ndim: int) -> Sequence[int]:
    order = [*range(ndim)]
    first, second = (given[0], given[1]) if len(given) > 1 else (-2, -1)
    order[first], order[second] = order[second], order[first]
    return order


def permuted(given: Sequence[int], ndim: int) -> Sequence[int]:
    dims = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    return [dim % ndim for dim in dims]


def moved_to(given: Sequence[int | Sequence[int]], ndim: int) -> Sequence[int]:
    """movedim(x, source, destination)"""
    source, destination = [[dim % ndim for dim in ((each,) if isinstance(each, int) else each)] for each in given]
    rest = iter([dim for dim in range(ndim) if dim not in source])
    by_place = dict(zip(destination, source, strict=True))
    return [by_place[place] if place in by_place else next(rest) for place in range(ndim)]


def turned(given: Sequence[int], ndim: int) -> Sequence[int]:
    return range(ndim)[::-1]


def unsqueezed(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    dim, new = dim_of(input_of(args, kwargs)), kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return None if dim is None else dim - int(new % out.ndim - out.ndim >= dim)


def squeezed(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    x, given = input_of(args, kwargs), kwargs.get("dim", args[1] if len(args) > 1 else None)
    dim = dim_of(x)
    if dim is None:
        return None
    over = range(x.ndim) if given is None else (given,) if isinstance(given, int) else given
    gone = [each % x.ndim - x.ndim for each in over if x.shape[each] == 1]
    if dim in gone or given is None:  # of one feature, or a number of them that depends on the ranks
        raise Mixed
    return dim + sum(each > dim for each in gone)


def triangle(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    """tril(x)"""
    dim = dim_of(input_of(args, kwargs))
    return None if dim in (-1, -2) else dim


def as_complex(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    """viewas_complex(x): pairs of the last dim are one number; view_as_real(x)"""
    dim = dim_of(input_of(args, kwargs))
    return None if dim is None or (dim == -1 and out.is_complex()) else dim + (1 if out.is_complex() else -1)
