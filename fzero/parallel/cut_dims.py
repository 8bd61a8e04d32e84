"""The dim of an operation's result that is cut: found by the shapes that slices of other sizes give.

A dim of 0 says that the result is a part of a sum over the dim that was cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from fzero.base import private, pytree, thread_state
from fzero.parallel.cut_shapes import Call, Mixed
from fzero.parallel.own_size import OwnSize
from fzero.table.handle import Function, Operands
from fzero.table.placements import Cut

_TIMES = (1009, 2003)  # as large as slices are tried


class _Like(NamedTuple):
    """A tensor, or a size that is read of a slice: its sizes, the dim that is cut (0: none), and its dtype."""

    sizes: tuple[int, ...]
    dim: int
    dtype: torch.dtype | None

    def times(self, many: int) -> Any:
        sizes = list(self.sizes)
        if self.dim:
            sizes[self.dim] = max(sizes[self.dim], 1) * many
        return sizes[0] if self.dtype is None else torch.empty(sizes, dtype=self.dtype, device="meta")


def grown(
    func: Function, args: Operands, kwargs: Mapping[str, Any], cut_of: Callable[[object], Cut | None]
) -> tuple[int, int]:
    """The dim of the result, from the end, that grows as slices do, 0 where none does; and how many dims there are.

    Raises:
        Mixed: it does not run with other sizes, or slices are not taken together, element by element.
    """

    def like(x: object) -> object:
        if isinstance(x, torch.Tensor):
            own = cut_of(x)
            return _Like(tuple(x.shape), own.dim if own is not None else 0, x.dtype)
        if isinstance(x, torch.Size):
            return tuple(map(like, x))
        return _Like((int.__index__(x),), -1, None) if type(x) is OwnSize else x

    flat, spec = pytree.flatten((args, dict(kwargs)))
    leaves = tuple(map(like, flat))
    try:
        found = _grown(func, spec, leaves)
    except TypeError:  # one of them has no hash
        found = _grown.__wrapped__(func, spec, leaves)
    if found is None:
        raise Mixed
    return found


@functools.lru_cache(4096)
def _grown(func: Function, spec: pytree.Spec, leaves: tuple[Any, ...]) -> tuple[int, int] | None:
    cut = [place for place, x in enumerate(leaves) if isinstance(x, _Like) and x.dim and x.dtype is not None]
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
    func: Function, spec: pytree.Spec, leaves: tuple[Any, ...], times: Mapping[int, int], others: int
) -> torch.Size | None:
    """That of the first result, where slices are so many times as large; None where it does not run so."""

    def made(x: object, times: int) -> object:
        if isinstance(x, _Like):
            return x.times(times)
        return tuple([made(each, times) for each in x]) if type(x) is tuple else x

    with (
        private.below_transforms(),
        thread_state.without_dispatch_modes(),
        private.under_function_modes(()),
        torch.no_grad(),
    ):
        args, kwargs = pytree.unflatten(spec, [made(x, times.get(i, others)) for i, x in enumerate(leaves)])
        try:
            out = func(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None
    out = out[0] if isinstance(out, (tuple, list)) and out else out
    return out.shape if isinstance(out, torch.Tensor) else None


def by_shape(call: Call) -> int:
    """Of what leaves the elements along a dim apart, or goes over other dims: mean(x, dim), transpose(x), x * y."""
    return contracted(call) or _mixed()


def contracted(call: Call) -> int:
    """Of what adds up the elements along dims that are gone: sum(x, dim), linear(x, weight), einsum(...)."""
    dim, ndim = grown(call.func, call.args, call.kwargs, call.cut_of)
    cut = [x for x in pytree.leaves((call.args, dict(call.kwargs))) if call.cut_of(x) is not None]
    if (call.out is not None and call.out.ndim != ndim) or (call.func is torch.einsum and len(cut) > 3):
        raise Mixed
    if not dim and call.given.get("bias") is not None:  # which each rank would add
        raise Mixed
    return dim


def _mixed() -> int:
    raise Mixed


def over(call: Call) -> int:
    """Over some dims, which stay: softmax(x, dim), sort(x, dim)."""
    return _over(call, call.given["dim"])


def _over(call: Call, dims: object) -> int:
    dims = (dims,) if type(dims) is int else dims
    if not isinstance(dims, (tuple, list, range)) or not dims:
        raise Mixed  # over all
    if call.dim in {each % call.x.ndim - call.x.ndim for each in dims}:
        raise Mixed
    return by_shape(call)


def normed(call: Call) -> int:
    """Over the last dims: layer_norm(x, normalized_shape)."""
    return _over(call, range(-len(call.given["normalized_shape"]), 0))


def triangle(call: Call) -> int:
    """tril(x)."""
    return _over(call, (-2, -1))


def along(call: Call) -> int:
    """Along a dim that is said: squeeze(x, dim), repeat_interleave(x, repeats, dim)."""
    return _mixed() if call.given["dim"] is None else by_shape(call)


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
    given = (call.x, *call.more)
    if {call.dim_of(x) for x in given[:3]} & {-1, -2}:
        raise Mixed
    if not all(_same_heads(call.own, cut) for x in given if (cut := call.cut_of(x)) is not None):
        raise Mixed
    if any(call.cut_of(x) is None and x.ndim > 2 and x.shape[-3] > 1 for x in given[1:3]):
        raise Mixed  # of several heads of keys, some go with each slice
    mask = call.given["attn_mask"]
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
    """Of what is known for parts of sums alone."""
    raise Mixed
