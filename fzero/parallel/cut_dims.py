"""Along which dim the result of an operation is cut, where an operand is; what mixes its slices is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fzero.capture.handle import Function, Operands

DimOf = Callable[[object], int | None]  # of an operand, the dim that it is cut along, from the end, where it is known
Given = dict[str, Any]


class Mixed(Exception):
    """An operation goes over the dim that is cut."""


def cut_dim(func: Function, args: Operands, kwargs: Given, out: object, dim_of: DimOf) -> int | None:
    """The dim of the result, from the end; None where it is not known.

    Raises:
        Mixed: elements of slices of several ranks would be needed.
    """
    rule = _RULES.get(func)
    return None if rule is None or not isinstance(_first(out), torch.Tensor) else rule(args, kwargs, out, dim_of)


def _first(out: object) -> Any:
    return out[0] if isinstance(out, (tuple, list)) and out else out


def _input(args: Operands, kwargs: Given) -> Any:
    return args[0] if args else kwargs.get("input")


def _pointwise(args: Operands, kwargs: Given, out: Any, dim_of: DimOf) -> int | None:
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    dims = {dim for x in tensors if (dim := dim_of(x)) is not None}
    if len(dims) != 1:
        return None
    (dim,) = dims
    for x in tensors:  # one element by rank would go with each of another one's
        if dim_of(x) == dim and x.shape[dim] != out.shape[dim]:
            raise Mixed
    return dim


def _along(args: Operands, kwargs: Given, out: Any, dim_of: DimOf) -> int | None:
    """Over dims: mean(x, dim, keepdim), softmax(x, dim), sort(x, dim)."""
    x, dim = _input(args, kwargs), dim_of(_input(args, kwargs))
    if dim is None:
        return None
    second = args[1] if len(args) > 1 else None
    if isinstance(second, torch.Tensor):
        return _pointwise(args, kwargs, _first(out), dim_of)
    over = kwargs.get("dim", kwargs.get("axis", second))
    return _without(x, dim, over, _first(out))


def _at(position: int, default: int) -> Callable[..., int | None]:
    """Over the dim that is this argument."""

    def rule(args: Operands, kwargs: Given, out: Any, dim_of: DimOf) -> int | None:
        x, dim = _input(args, kwargs), dim_of(_input(args, kwargs))
        over = kwargs.get("dim", args[position] if len(args) > position else default)
        return None if dim is None else _without(x, dim, over, _first(out))

    return rule


def _without(x: torch.Tensor, dim: int, over: object, out: torch.Tensor) -> int:
    """The cut dim behind an operation over others."""
    over = (over,) if isinstance(over, int) else over
    if not isinstance(over, (tuple, list)) or not over:
        raise Mixed  # over all
    from_end = {each % x.ndim - x.ndim for each in over}
    if dim in from_end:
        raise Mixed
    return dim if out.ndim == x.ndim else dim + sum(each > dim for each in from_end)


def _last(args: Operands, kwargs: Given, out: Any, dim_of: DimOf) -> int | None:
    """Over the last dims: layer_norm(x, normalized_shape)."""
    dim = dim_of(_input(args, kwargs))
    shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
    if dim is not None and dim >= -len(shape):
        raise Mixed
    return dim


def _applied(args: Operands, kwargs: Given, out: Any, dim_of: DimOf) -> int | None:
    """linear(x, weight)."""
    dim = dim_of(_input(args, kwargs))
    if dim == -1:
        raise Mixed
    return dim


def _product(args: Operands, kwargs: Given, out: Any, dim_of: DimOf) -> int | None:
    """x @ y."""
    if len(args) < 2 or not all(isinstance(x, torch.Tensor) and x.ndim > 1 for x in args[:2]):
        return None
    left, right = dim_of(args[0]), dim_of(args[1])
    if left == -1 or right == -2:
        raise Mixed
    dims = {dim for dim in (left, right) if dim is not None}
    return dims.pop() if len(dims) == 1 else None


def _attended(args: Operands, kwargs: Given, out: Any, dim_of: DimOf) -> int | None:
    dims = {dim_of(x) for x in args[:3]}
    if dims & {-1, -2}:
        raise Mixed
    return dims.pop() if len(dims) == 1 else None


def _same(args: Operands, kwargs: Given, out: Any, dim_of: DimOf) -> int | None:
    return dim_of(_input(args, kwargs))


def _reshaped(args: Operands, kwargs: Given, out: Any, dim_of: DimOf) -> int | None:
    x, dim = _input(args, kwargs), dim_of(_input(args, kwargs))
    if dim is None or not x.numel():
        return None
    before, size = math.prod(x.shape[: x.ndim + dim]), x.shape[dim]
    for place, other in enumerate(out.shape):
        if math.prod(out.shape[:place]) == before:  # a dim of one may be a new one, or all that this rank has
            fits = other > 1 and size > 1 and (size % other == 0 or other % size == 0)
            return place - out.ndim if fits else None
    return None


def _moved(order: Callable[[Sequence[Any], int], Sequence[int]]) -> Callable[..., int | None]:
    """Dims in another order, of which `order(arguments, ndim)` says where each comes from."""

    def rule(args: Operands, kwargs: Given, out: Any, dim_of: DimOf) -> int | None:
        x, dim = _input(args, kwargs), dim_of(_input(args, kwargs))
        if dim is None:
            return None
        more = [*args[1:], *kwargs.values()]
        return [*order(more, x.ndim)].index(x.ndim + dim) - int(x.ndim)

    return rule


def _exchanged(given: Sequence[Any], ndim: int) -> Sequence[int]:
    order = [*range(ndim)]
    first, second = (given[0], given[1]) if len(given) > 1 else (-2, -1)
    order[first], order[second] = order[second], order[first]
    return order


def _permuted(given: Sequence[Any], ndim: int) -> Sequence[int]:
    dims = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    return [dim % ndim for dim in dims]


def _unsqueezed(args: Operands, kwargs: Given, out: Any, dim_of: DimOf) -> int | None:
    dim, new = dim_of(_input(args, kwargs)), kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return None if dim is None else dim - int(new % out.ndim - out.ndim > dim)


def _indexed(args: Operands, kwargs: Given, out: Any, dim_of: DimOf) -> int | None:
    x, dim = _input(args, kwargs), dim_of(_input(args, kwargs))
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if dim is None or any(not (each is None or each is ... or isinstance(each, (int, slice))) for each in index):
        return None
    taken = sum(each is not None and each is not ... for each in index)
    fill = [slice(None)] * (x.ndim - taken)
    at = index.index(...) if ... in index else len(index)
    place, behind = 0, 0  # in x; dims of the result from the cut one on
    for each in (*index[:at], *fill, *index[at + 1 :]):
        here = each is not None and place == x.ndim + dim
        if here and isinstance(each, int):
            raise Mixed
        if here and each != slice(None):
            return None
        behind += (here or bool(behind)) and not isinstance(each, int)
        place += each is not None
    return -behind


def _named(names: str, *owners: object) -> list[Function]:
    return [found for name in names.split() for owner in owners if (found := getattr(owner, name, None)) is not None]


_BOTH = (torch.Tensor, torch)
_RULES: dict[object, Callable[..., int | None]] = {
    **dict.fromkeys(
        _named(
            "abs neg negative exp exp2 log log2 log1p expm1 sqrt rsqrt square sin cos tan tanh sigmoid relu erf erfc "
            "reciprocal sign floor ceil round add sub subtract mul multiply div divide true_divide rsub pow maximum "
            "minimum clamp clamp_min clamp_max where lerp addcmul addcdiv masked_fill nan_to_num eq ne lt le gt ge "
            "logical_and logical_or logical_not isnan isinf isfinite clone to type_as float double half bfloat16 "
            "contiguous detach expand expand_as bernoulli_ add_ mul_ sub_ div_ relu_ silu_ "
            "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__ "
            "__iadd__ __imul__ __isub__ __itruediv__",
            *_BOTH,
        ),
        _pointwise,
    ),
    **dict.fromkeys(
        _named(
            "relu gelu silu mish softplus elu selu celu leaky_relu relu6 hardtanh hardswish hardsigmoid logsigmoid "
            "softsign tanhshrink tanh sigmoid dropout alpha_dropout",
            F,
        ),
        _pointwise,
    ),
    **dict.fromkeys(
        [
            *_named(
                "mean sum var std amax amin max min argmax argmin prod any all logsumexp softmax log_softmax cumsum "
                "cumprod argsort sort median nanmean nansum count_nonzero flip unbind",
                *_BOTH,
            ),
            *_named("softmax log_softmax softmin", F),
        ],
        _along,
    ),
    **dict.fromkeys(_named("roll norm topk kthvalue", *_BOTH), _at(2, -1)),
    F.normalize: _at(2, 1),
    F.glu: _at(1, -1),
    **dict.fromkeys(_named("layer_norm rms_norm", F, torch), _last),
    F.linear: _applied,
    **dict.fromkeys(_named("matmul __matmul__ bmm", *_BOTH), _product),
    F.scaled_dot_product_attention: _attended,
    **dict.fromkeys(_named("chunk split tensor_split repeat_interleave narrow", *_BOTH), _same),
    **dict.fromkeys(_named("reshape view flatten unflatten", *_BOTH), _reshaped),
    **dict.fromkeys(_named("transpose swapaxes swapdims", *_BOTH), _moved(_exchanged)),
    torch.Tensor.mT.__get__: _moved(_exchanged),  # type: ignore[attr-defined]
    **dict.fromkeys(_named("permute", *_BOTH), _moved(_permuted)),
    **dict.fromkeys(_named("unsqueeze", *_BOTH), _unsqueezed),
    torch.Tensor.__getitem__: _indexed,
}
