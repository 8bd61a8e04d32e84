"""Where a dim that is cut lies in a tensor of another shape, or with its dims in another order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero.capture.handle import Operands

Given = dict[str, Any]
DimOf = Callable[[object], int | None]  # the dim that is cut, from the end; None where it is not known


class Mixed(Exception):
    """An operation goes over the dim that is cut."""


def input_of(args: Operands, kwargs: Given) -> Any:
    return args[0] if args else kwargs.get("input")


def reshaped(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    x, dim = input_of(args, kwargs), dim_of(input_of(args, kwargs))
    if dim is None or not x.numel():
        return None
    place, size = x.ndim + dim, x.shape[dim]
    ends = [math.prod(out.shape[:count]) for count in range(out.ndim + 1)]
    before = math.prod(x.shape[:place])
    if before not in ends:  # it may become the inner part of a dim, as a whole
        outer = {math.prod(x.shape[:count]) for count in range(place)}
        inner = [start in outer and end == before * size for start, end in itertools.pairwise(ends)]
        if any(inner[:-1]):  # not of the last one, of features
            return None
        raise Mixed
    found = ends.index(before)
    if found == out.ndim:  # one element, as the inner part of features
        raise Mixed
    other, sizes = out.shape[found], _sizes(args, kwargs)
    if len(sizes) == out.ndim and sizes[found] != -1 and -1 in sizes[found + 1 :]:
        raise Mixed  # a number of heads that all ranks have together, say
    if len(sizes) == out.ndim and sizes[found] == -1:
        return found - out.ndim
    if other == 1 or size == 1:  # a dim of one may be a new one, or all that this rank has
        return None
    return found - out.ndim if size % other == 0 or other % size == 0 else None


def flattened(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    """flatten(x, start_dim, end_dim)."""
    x, dim = input_of(args, kwargs), dim_of(input_of(args, kwargs))
    if dim is None:
        return None
    given = {"start_dim": 0, "end_dim": -1} | dict(zip(("start_dim", "end_dim"), args[1:], strict=False)) | kwargs
    start, end = [given[name] % x.ndim - x.ndim for name in ("start_dim", "end_dim")]
    if dim <= start:
        return end if dim == start else dim + end - start
    if dim > end:
        return dim
    if end == -1:
        raise Mixed  # the inner part of features
    return None


def _sizes(args: Operands, kwargs: Given) -> list[int]:
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


def unsqueezed(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    dim, new = dim_of(input_of(args, kwargs)), kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return None if dim is None else dim - int(new % out.ndim - out.ndim > dim)


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
