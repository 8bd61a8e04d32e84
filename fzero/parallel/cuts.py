"""Where the dim that is cut lies behind an operation, found by the shapes that slices of other sizes would give.

A dim of 0 says that the result is a part of a sum over the dim that was cut. Operations have rules of their own where
shapes do not say whether they leave the dim alone, or what becomes of its parts.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fzero.base import private, pytree, thread_state
from fzero.parallel.own_size import OwnSize
from fzero.table.handle import Function
from fzero.table.placements import Cut


class Mixed(Exception):
    """An operation goes over the dim that is cut, or is not known to leave it alone."""


@dataclass(frozen=True, eq=False)
class Call:
    """A call of an operation, some of whose operands are cut."""

    func: Function  # the operation
    flat: Sequence[object]  # its arguments, as it is written, and their structure
    spec: pytree.Spec
    x: Any  # its first argument
    given: Mapping[str, Any]  # all of them by name
    out: Any  # the tensor that it gives; the first of several; None before it has run
    cut_of: Callable[[object], Cut | None]  # how an operand is cut; None where it is whole

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


# ---- by shapes

_TIMES = (1009, 2003)  # as large as slices are tried


class _Like(NamedTuple):
    """A tensor, or a size that is read of a slice: its sizes, the dim that is cut (0: none), and its dtype."""

    sizes: tuple[int, ...]
    dim: int
    dtype: torch.dtype | None

    def times(self, many: int) -> object:
        sizes = list(self.sizes)
        if self.dim:
            sizes[self.dim] = max(sizes[self.dim], 1) * many
        return sizes[0] if self.dtype is None else torch.empty(sizes, dtype=self.dtype, device="meta")


def grown(call: Call) -> tuple[int, int]:
    """The dim of the result, from the end, that grows as slices do, 0 where none does; and how many dims there are."""
    leaves = tuple([_like(x, call.dim_of(x) or 0) if isinstance(x, torch.Tensor) else _like(x) for x in call.flat])
    try:
        found = _grown(call.func, call.spec, leaves)
    except TypeError:  # one of them has no hash
        found = _grown.__wrapped__(call.func, call.spec, leaves)
    if found is None:
        raise Mixed
    return found


def _like(x: object, dim: int = 0) -> object:
    if isinstance(x, torch.Tensor):
        return _Like(tuple(x.shape), dim, x.dtype)
    if isinstance(x, torch.Size):
        return tuple(map(_like, x))
    return _Like((int.__index__(x),), -1, None) if type(x) is OwnSize else x


def _made(x: object, times: int) -> object:
    if isinstance(x, _Like):
        return x.times(times)
    return tuple([_made(each, times) for each in x]) if type(x) is tuple else x


@functools.lru_cache(4096)
def _grown(func: Function, spec: pytree.Spec, leaves: tuple[object, ...]) -> tuple[int, int] | None:
    cut = [place for place, x in enumerate(leaves) if isinstance(x, _Like) and x.dim and x.dtype is not None]
    if func is torch.einsum and len(cut) > 3:  # pairs of which one would have to look at
        return None
    few, many = [_shape(func, spec, leaves, dict.fromkeys(cut, times), times) for times in _TIMES]
    if few is None or many is None or len(few) != len(many):
        return None
    for place in cut[1:]:  # those that need not fit are taken together otherwise than by rank
        if _shape(func, spec, leaves, {**dict.fromkeys(cut, _TIMES[0]), place: _TIMES[1]}, _TIMES[0]) is not None:
            return None
    dims = [dim - len(few) for dim, (a, b) in enumerate(zip(few, many, strict=True)) if a != b]
    if len(dims) > 1 or any(few[dim] * _TIMES[1] != many[dim] * _TIMES[0] for dim in dims):
        return None
    return (dims[0] if dims else 0), len(few)


def _shape(
    func: Function, spec: pytree.Spec, leaves: tuple[object, ...], times: Mapping[int, int], others: int
) -> torch.Size | None:
    """That of the first result, where slices are so many times as large; None where it does not run so."""
    with (
        private.below_transforms(),
        thread_state.without_dispatch_modes(),
        private.under_function_modes(()),
        torch.no_grad(),
    ):
        args, kwargs = pytree.unflatten(spec, [_made(x, times.get(i, others)) for i, x in enumerate(leaves)])
        try:
            out = func(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None
    out = out[0] if isinstance(out, (tuple, list)) and out else out
    return out.shape if isinstance(out, torch.Tensor) else None


def by_shape(call: Call) -> int:
    """Of what leaves the elements along a dim apart, or goes over other dims: mean(x, dim), transpose(x), x * y."""
    dim = contracted(call)
    return dim if dim else unknown(call)


def contracted(call: Call) -> int:
    """Of what adds up the elements along dims that are gone: sum(x, dim), linear(x, weight), einsum(...)."""
    dim, ndim = grown(call)
    if call.out is not None and call.out.ndim != ndim:
        raise Mixed
    if not dim and call.given.get("bias") is not None:  # which each rank would add
        raise Mixed
    return dim


def over(call: Call, dims: object = None) -> int:
    """Over some dims, which stay: softmax(x, dim), sort(x, dim)."""
    dims = call.given["dim"] if dims is None else dims
    dims = (dims,) if type(dims) is int else dims
    if not isinstance(dims, (tuple, list, range)) or not dims:
        raise Mixed  # over all
    if call.dim in {each % call.x.ndim - call.x.ndim for each in dims}:
        raise Mixed
    return by_shape(call)


def over_last(call: Call) -> int:
    """Over the last dims: layer_norm(x, normalized_shape), tril(x)."""
    return over(call, range(-len(call.given.get("normalized_shape", (-2, -1))), 0))


def along(call: Call) -> int:
    """Along a dim that is said: squeeze(x, dim), repeat_interleave(x, repeats, dim)."""
    return unknown(call) if call.given["dim"] is None else by_shape(call)


def joined(call: Call) -> int:
    """cat(tensors, dim), but for slices of one beside those of another."""
    ndim = call.out.ndim
    if call.given["dim"] % ndim - ndim in map(call.dim_of, call.given["tensors"]):
        raise Mixed
    return by_shape(call)


def same(call: Call) -> Cut:
    """Of the first operand alone: to(x, other)."""
    return call.own


def like_another(call: Call) -> int:
    """view_as(x, other)."""
    other = call.given["other"]
    if call.x.shape != other.shape or call.dim_of(other) != call.dim:
        raise Mixed
    return call.dim


def attended(call: Call) -> Cut:
    """Attention of heads that are cut; every rank has the heads of keys that go with its heads of queries."""
    given = [call.given[name] for name in ("query", "key", "value", "attn_mask")]
    if {call.dim_of(x) for x in given[:3]} & {-1, -2}:
        raise Mixed
    if not all(_same_heads(call.own, cut) for x in given if (cut := call.cut_of(x)) is not None):
        raise Mixed
    if any(call.cut_of(x) is None and x.ndim > 2 and x.shape[-3] > 1 for x in given[1:3]):
        raise Mixed  # of several heads of keys, some go with each slice
    mask = given[3]
    if isinstance(mask, torch.Tensor) and call.dim_of(mask) != call.dim:
        if call.dim_of(mask) is not None or (mask.ndim >= -call.dim and mask.shape[call.dim] != 1):
            raise Mixed  # of all heads, of which one may be broadcast to the rank's
    return call.own


def _same_heads(q: Cut, k: Cut) -> bool:
    """Tells whether there are as many heads of queries for each head of keys on every rank."""
    if q.parts is None or k.parts is None:
        return q.parts == k.parts
    if len(q.parts) != 1 or len(k.parts) != 1 or q.outer != k.outer:
        return q == k
    own, other = q.parts[0], k.parts[0]
    return [size * sum(other) for size in own] == [size * sum(own) for size in other]


def unknown(call: Call) -> int:
    """Of what nothing is known, or of parts of sums alone."""
    raise Mixed


# ---- other shapes


def reshaped(call: Call) -> Cut:
    """view(x, sizes): the slice may become one dim, the inner part of one, or several; the outermost is cut then."""
    own, sizes = call.own, [*call.given.get("sizes", ())]
    if "dim" in call.given:  # unflatten(dim, sizes)
        dim = call.given["dim"] % call.x.ndim
        if dim != call.x.ndim + own.dim and not any(type(size) is OwnSize for size in sizes):
            return own if dim < call.x.ndim + own.dim else own._replace(dim=own.dim - len(sizes) + 1)
        sizes = [*call.x.shape[:dim], *sizes, *call.x.shape[dim + 1 :]]
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
    around = [
        dim
        for dim in range(out.ndim)
        if steps[dim] <= low and ends[dim] >= high and not (ends[dim] % high or high % steps[dim])
    ]
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
    return _placed(x, own, out, dim)


def _placed(x: torch.Tensor, own: Cut, out: torch.Tensor, dim: int) -> Cut:
    """What lies in a dim of the result, of which it may be the inner part: then several slices follow one another."""
    count = x.shape[own.dim] // own.outer
    inner, end = [math.prod(each) for each in (x.shape[x.ndim + own.dim :], out.shape[dim:])]
    outer = max(1, end * own.outer // inner if inner else 1)
    return sized(own, count, out.shape[dim] // outer)._replace(dim=dim - out.ndim, outer=outer)


def flattened(call: Call) -> Cut:
    """flatten(x, start_dim, end_dim)."""
    return _placed(call.x, call.own, call.out, by_shape(call) + call.out.ndim)


# ---- parts of a tensor


def indexed(call: Call) -> int:
    """x[index], of dims that are not cut; a mask stands for the places that it says."""
    index = call.given["index"] if isinstance(call.given["index"], tuple) else (call.given["index"],)
    masks = [isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in index]
    if any(masks):
        places = [each.nonzero(as_tuple=True) if mask else (each,) for each, mask in zip(index, masks, strict=True)]
        flat, spec = pytree.flatten(((call.x, tuple(itertools.chain.from_iterable(places))), {}))
        call = replace(call, flat=flat, spec=spec)
    dim = by_shape(call)
    if call.out.shape[dim] != call.x.shape[call.dim]:
        raise Mixed  # every second one of each rank's slice, say
    return dim


def taken_apart(call: Call) -> Cut | list[Cut]:
    """chunk(x, many, dim)."""
    x, own, many = call.x, call.own, call.given["many"]
    if call.given["dim"] % x.ndim - x.ndim != own.dim:
        return own
    if own.own is None or own.parts is None or own.outer > 1:
        raise Mixed
    count, size = len(own.parts), x.shape[own.dim]
    if len({*own.parts}) > 1 or many != count or call.out.shape[own.dim] * count != size:
        raise Mixed
    return [own._replace(parts=(part,)) for part in own.parts]


def gated(call: Call) -> Cut:
    """glu(x, dim), of two parts of one size."""
    found = taken_apart(call)
    return found[0] if isinstance(found, list) else found
