"""Rules of operations on tensors that are cut: the dim of the result that is cut, from the end, or how it is.

A dim of 0 says that the result is a part of a sum over the dim that was cut.
"""

from __future__ import annotations

from collections.abc import Set
from typing import TypeVar

import torch

from fzero.parallel.cut_shapes import Call, Mixed
from fzero.table.placements import Cut

T = TypeVar("T")


def _one(found: Set[T | None]) -> T:
    """What all that is cut has in common."""
    if len(found) != 1 or (one := next(iter(found))) is None:
        raise Mixed
    return one


def pointwise(call: Call) -> int:
    """Element by element, with broadcasting."""
    tensors = [x for x in (call.x, *call.more) if isinstance(x, torch.Tensor)]
    dim = _one({dim for x in tensors if (dim := call.dim_of(x)) is not None})
    for x in tensors:  # what is whole is as large as all slices, or the same for each element
        if call.dim_of(x) is None and x.ndim >= -dim and x.shape[dim] != 1:
            raise Mixed
    return dim


def same(call: Call) -> Cut:
    """Of the first operand alone: to(x, other)."""
    return call.own


def over(call: Call) -> int:
    """Over some dims: mean(x, dim, keepdim), softmax(x, dim), sort(x, dim)."""
    return _without(call, call.given["dim"])


def _without(call: Call, dims: object) -> int:
    """The cut dim behind an operation over others."""
    dims = (dims,) if type(dims) is int else dims  # std(x, unbiased)
    if not isinstance(dims, (tuple, list, range)) or not dims:
        raise Mixed  # over all
    from_end = {each % call.x.ndim - call.x.ndim for each in dims}
    if call.dim in from_end:
        raise Mixed
    stays = call.given.get("keepdim") if call.out is None else call.out.ndim == call.x.ndim
    return call.dim if stays else call.dim + sum(each > call.dim for each in from_end)


def largest(call: Call) -> int:
    """max(x, dim), max(x, y)."""
    other = isinstance(call.given["dim"], torch.Tensor)
    return pointwise(call) if other else over(call)


def total(call: Call) -> int:
    """sum(x, dim, keepdim), of which each rank has its part where dims that are cut are among them."""
    dims, ndim = call.given["dim"], call.x.ndim
    dims = range(ndim) if dims is None or dims == () else (dims,) if isinstance(dims, int) else dims
    return 0 if call.dim in {each % ndim - ndim for each in dims} else _without(call, tuple(dims))


def normed(call: Call) -> int:
    """Over the last dims: layer_norm(x, normalized_shape)."""
    return _without(call, range(-len(call.given["normalized_shape"]), 0))


def triangle(call: Call) -> int:
    """tril(x)."""
    return _without(call, (-2, -1))


def applied(call: Call) -> int:
    """linear(x, weight, bias)."""
    bias = call.given["bias"]
    at = tuple(map(call.dim_of, (call.x, call.given["weight"], bias)))
    if at[1:] == (None, None) and at[0] != -1:
        return call.dim
    if at == (-1, -1, None) and bias is None:
        return 0
    if at[:2] == (None, -2) and (at[2] == -1 or bias is None):
        return -1
    raise Mixed


def product(call: Call) -> int:
    """x @ y."""
    tensors = [x for x in (call.x, *call.more)[:2] if isinstance(x, torch.Tensor)]
    left, right = map(call.dim_of, tensors)
    if left == -1 and right == -2:
        return 0
    if left == -1 or right == -2 or any(x.ndim == 1 for x in tensors):
        raise Mixed
    return _one({left, right} - {None})


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


def joined(call: Call) -> int:
    """cat(tensors, dim)."""
    tensors = [x for x in call.given["tensors"] if x.shape != (0,)]  # which torch lets join anything, as caches begin
    dims, ndim = {call.dim_of(x) for x in tensors}, call.out.ndim
    if call.given["dim"] % ndim - ndim in dims:  # slices of one beside those of another
        raise Mixed
    return _one(dims)


def stacked(call: Call) -> int:
    """stack(tensors, dim)."""
    dim, ndim = _one({call.dim_of(x) for x in call.given["tensors"]}), call.out.ndim
    return dim - int(call.given["dim"] % ndim - ndim >= dim)


def summed(call: Call) -> int:
    """einsum(equation, *operands)."""
    equation, tensors = call.x, call.given["operands"]
    if not isinstance(equation, str) or "->" not in equation:
        raise Mixed
    left, right = equation.replace(" ", "").split("->")
    each = list(zip(left.split(","), tensors, strict=True))
    letters = {_letter(subscripts, x.ndim, dim) for subscripts, x in each if (dim := call.dim_of(x)) is not None}
    letter = _one(letters)
    if letter in right:
        before, _, behind = right.partition("...")
        return behind.index(letter) - len(behind) if letter in behind else before.index(letter) - call.out.ndim
    if any(call.dim_of(x) is None for subscripts, x in each if letter in subscripts):
        raise Mixed
    return 0  # a sum over it


def _letter(subscripts: str, ndim: int, dim: int) -> str:
    """That of a dim, from the end."""
    before, dots, behind = subscripts.partition("...")
    if -dim <= len(behind) or not dots:
        return (behind or before)[dim]
    if ndim + dim < len(before):
        return before[ndim + dim]
    raise Mixed


def padded(call: Call) -> int:
    """pad(x, two sizes for each dim, the last one first)."""
    if any(call.given["pad"][-2 * call.dim - 2 : -2 * call.dim]):
        raise Mixed
    return call.dim


def like_another(call: Call) -> int:
    """view_as(x, other)."""
    other = call.given["other"]
    if call.x.shape != other.shape or call.dim_of(other) != call.dim:
        raise Mixed
    return call.dim


def by_slope(call: Call) -> int:
    """prelu(x, weight)."""
    if call.given["weight"].numel() != 1:
        raise Mixed
    return call.dim


def unknown(call: Call) -> int:
    """Of what is known for parts of sums alone."""
    raise Mixed


JOINT = {  # rules of several operands that are cut
    *(pointwise, largest, product, applied, joined, stacked, summed, attended, like_another, same),
}
