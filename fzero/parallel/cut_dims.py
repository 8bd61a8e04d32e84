"""Along which dim the result of an operation is cut, where an operand is; what mixes its slices is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fzero.base import pytree
from fzero.parallel.cut_parts import gated, indexed, taken_apart
from fzero.parallel.cut_shapes import (
    DimOf,
    Given,
    Mixed,
    as_complex,
    exchanged,
    flattened,
    input_of,
    moved,
    moved_to,
    permuted,
    reshaped,
    sized,
    squeezed,
    triangle,
    turned,
    unsqueezed,
)
from fzero.parallel.elementwise import BOTH, ELEMENTWISE, named
from fzero.parallel.own_size import OwnSize
from fzero.parallel.partial import PARTIAL, behind_partial
from fzero.table.handle import Function, Operands
from fzero.table.placements import Cut

CutOf = Callable[[object], Cut | None]


def cut_behind(func: Function, args: Operands, kwargs: Given, out: object, cut_of: CutOf) -> Cut | list[Cut]:
    """How the result is cut; each of several, where these differ.

    Args:
        cut_of: how an operand is; None where it is whole.

    Raises:
        Mixed: elements of slices of several ranks would be needed, or nothing is known of what it does along that dim.
    """

    def dim_of(x: object) -> int | None:
        own = cut_of(x)
        return None if own is None else own.dim

    kwargs = {("dim" if name == "axis" else name): x for name, x in kwargs.items()}
    if any(cut_of(x) == PARTIAL for x in pytree.leaves((args, kwargs))):
        return behind_partial(func, args, kwargs, out, cut_of)
    first = _first(out)
    if not isinstance(first, torch.Tensor):
        raise Mixed  # numbers of a slice
    operands = [x for arg in (*args, *kwargs.values()) for x in (arg if isinstance(arg, (tuple, list)) else (arg,))]
    known = [(x, own) for x in operands if isinstance(x, torch.Tensor) and (own := cut_of(x)) is not None]
    x, own = known[0]
    if func in _PARTS:
        if x is not input_of(args, kwargs) or len(known) > 1:  # a slice says which elements are taken
            raise Mixed
        return _PARTS[func](x, own, args, kwargs, first)
    rule = _RULES.get(func)
    dim = None if rule is None else rule(args, kwargs, out, dim_of)
    known = known[:1] if rule is _kept else known
    if dim is None or (rule not in _JOINT and len(known) > 1 and not (rule is _along and known[1][0] is args[1])):
        raise Mixed
    if rule is _attended:
        if any(not _same_heads(own, each) for _, each in known[1:]):
            raise Mixed
        return own._replace(dim=dim)
    if any((each.outer, each.parts) != (own.outer, own.parts) for _, each in known):
        raise Mixed  # slices of other parts
    if not dim:
        return PARTIAL
    if rule is not _repeated and any(first.shape[dim] != x.shape[each.dim] for x, each in known):
        raise Mixed  # one element by rank that goes with each of another one's
    return sized(own, x.shape[own.dim] // own.outer, first.shape[dim] // own.outer)._replace(dim=dim)


def _same_heads(q: Cut, k: Cut) -> bool:
    """Tells whether every rank has the heads of keys that go with its heads of queries, one or several with each."""
    if q.parts is None or k.parts is None:
        return q.parts == k.parts
    if len(q.parts) != 1 or len(k.parts) != 1 or q.outer != k.outer:
        return q == k
    own, other = q.parts[0], k.parts[0]
    return [size * sum(other) for size in own] == [size * sum(own) for size in other]


def _first(out: object) -> Any:
    return out[0] if isinstance(out, (tuple, list)) and out else out


def _pointwise(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    dims = {dim for x in tensors if (dim := dim_of(x)) is not None}
    if len(dims) != 1 or not isinstance(out, torch.Tensor):  # where(x): places
        raise Mixed
    (dim,) = dims
    for x in tensors:  # what is whole is as large as all slices, or the same for each element
        if dim_of(x) is None and x.ndim >= -dim and x.shape[dim] != 1:
            raise Mixed
    return dim


def _expanded(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    """expand(x, sizes)."""
    dim = dim_of(input_of(args, kwargs))
    more = [*args[1:], *kwargs.values()]
    sizes = [*more[0]] if len(more) == 1 and isinstance(more[0], (tuple, list)) else more
    if any(type(size) is OwnSize and place - len(sizes) != dim for place, size in enumerate(sizes)):
        raise Mixed
    return dim


def _along(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    """Over dims: mean(x, dim, keepdim), softmax(x, dim), sort(x, dim)."""
    x, dim = input_of(args, kwargs), dim_of(input_of(args, kwargs))
    if dim is None:
        return None
    second = args[1] if len(args) > 1 and not isinstance(args[1], bool) else None  # std(x, unbiased)
    if isinstance(second, torch.Tensor):  # max(x, y)
        return _pointwise(args, kwargs, _first(out), dim_of)
    return _without(x, dim, kwargs.get("dim", second), _first(out))


def _total(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    """sum(x, dim, keepdim), of which each rank has its part where dims that are cut are among them."""
    x, dim = input_of(args, kwargs), dim_of(input_of(args, kwargs))
    over = kwargs.get("dim", args[1] if len(args) > 1 else None)
    over = range(x.ndim) if over is None or over == () else (over,) if isinstance(over, int) else over
    if dim is None or dim in {each % x.ndim - x.ndim for each in over}:
        return None if dim is None else 0
    return _without(x, dim, tuple(over), out)


def _at(position: int, default: int | None) -> Callable[..., int | None]:
    """Over the dim that is this argument."""

    def rule(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
        over = kwargs.get("dim", args[position] if len(args) > position else default)
        return _over(args, kwargs, _first(out), dim_of, over)

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


def _last(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    """Over the last dims: layer_norm(x, normalized_shape)."""
    dim = dim_of(input_of(args, kwargs))
    shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
    if dim is not None and dim >= -len(shape):
        raise Mixed
    return dim


def _applied(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    """linear(x, weight, bias)."""
    given: Given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    x, weight, bias = [dim_of(given.get(name)) for name in ("input", "weight", "bias")]
    if weight is None and bias is None and x != -1:
        return x
    if x == weight == -1 and given.get("bias") is None:
        return 0
    if x is None and weight == -2 and (bias == -1 or given.get("bias") is None):
        return -1
    raise Mixed


def _product(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    """x @ y."""
    tensors = [x for x in (*args, *kwargs.values())[:2] if isinstance(x, torch.Tensor)]
    if len(tensors) < 2:
        raise Mixed
    left, right = map(dim_of, tensors)
    dims = {dim for dim in (left, right) if dim is not None}
    if left == -1 and right == -2:
        return 0
    if left == -1 or right == -2 or len(dims) > 1 or (dims and any(x.ndim == 1 for x in tensors)):
        raise Mixed
    return dims.pop() if dims else None


def _attended(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    dims = {dim_of(x) for x in (*args, *kwargs.values())[:3]}
    if dims & {-1, -2}:
        raise Mixed
    return dim_of((*args, *kwargs.values())[0])


def _joined(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    """cat(tensors, dim)."""
    every: Sequence[torch.Tensor] = input_of(args, kwargs) if args else kwargs["tensors"]
    tensors = [x for x in every if x.shape != (0,)]  # which torch lets join anything, as caches begin with it
    along = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    dims = {dim_of(x) for x in tensors}
    if len(dims) > 1 or along % out.ndim - out.ndim in dims:  # slices of one beside those of another, or beside a whole
        raise Mixed
    return dims.pop()


def _stacked(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    """stack(tensors, dim)."""
    tensors: Sequence[torch.Tensor] = input_of(args, kwargs) if args else kwargs["tensors"]
    dims, new = {dim_of(x) for x in tensors}, kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if len(dims) > 1:
        raise Mixed
    dim = dims.pop()
    return None if dim is None else dim - int(new % out.ndim - out.ndim >= dim)


def _summed(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    """einsum(equation, *operands)."""
    equation, *given = args
    operands = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    if not isinstance(equation, str) or "->" not in equation:
        raise Mixed
    left, right = equation.replace(" ", "").split("->")
    tensors: list[torch.Tensor] = [*operands]  # type: ignore[list-item]
    each = list(zip(left.split(","), tensors, strict=True))
    letters = {_letter(subscripts, x.ndim, dim) for subscripts, x in each if (dim := dim_of(x)) is not None}
    if len(letters) > 1:
        raise Mixed
    (letter,) = letters
    if letter in right:
        before, _, behind = right.partition("...")
        return behind.index(letter) - len(behind) if letter in behind else before.index(letter) - out.ndim
    if any(dim_of(x) is None for subscripts, x in each if letter in subscripts):
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


def _repeated(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    """repeat_interleave(x, repeats, dim)."""
    repeats = kwargs.get("repeats", args[1] if len(args) > 1 else None)
    if type(repeats) is not int or kwargs.get("dim", args[2] if len(args) > 2 else None) is None:
        raise Mixed
    return dim_of(input_of(args, kwargs))


def _rolled(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    """roll(x, shifts, dims)."""
    over = kwargs.get("dims", args[2] if len(args) > 2 else ())
    return _over(args, kwargs, out, dim_of, over)


def _flipped(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    """flip(x, dims)."""
    more = kwargs.get("dims", args[1:])
    return _over(args, kwargs, out, dim_of, more[0] if len(more) == 1 and not isinstance(more[0], int) else more)


def _over(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf, dims: object) -> int | None:
    x, dim = input_of(args, kwargs), dim_of(input_of(args, kwargs))
    return None if dim is None else _without(x, dim, dims, out)


def _padded(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    """pad(x, two sizes for each dim, the last one first)."""
    dim, pad = dim_of(input_of(args, kwargs)), kwargs.get("pad", args[1] if len(args) > 1 else ())
    if dim is None or any(pad[-2 * dim - 2 : -2 * dim]):
        raise Mixed
    return dim


def _like_another(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    """view_as(x, other)."""
    x, other = input_of(args, kwargs), kwargs.get("other", args[-1])
    if x.shape != other.shape or dim_of(x) != dim_of(other):
        raise Mixed
    return dim_of(x)


def _by_slope(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    """prelu(x, weight)"""
    weight = kwargs.get("weight", args[-1])
    return dim_of(input_of(args, kwargs)) if weight.numel() == 1 else None


def _kept(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    """to(x, other), of which only the dtype matters."""
    return dim_of(input_of(args, kwargs))


def _same(args: Operands, kwargs: Given, out: torch.Tensor, dim_of: DimOf) -> int | None:
    return dim_of(input_of(args, kwargs))


_MOVED: dict[object, Callable[..., int | None]] = {
    **dict.fromkeys(named("transpose swapaxes swapdims t", *BOTH), moved(exchanged)),
    **dict.fromkeys(named("movedim moveaxis", *BOTH), moved(moved_to)),
    torch.Tensor.T.__get__: moved(turned),  # type: ignore[attr-defined]
    torch.Tensor.mT.__get__: moved(exchanged),  # type: ignore[attr-defined]
    **dict.fromkeys(named("permute", *BOTH), moved(permuted)),
}
_RULES: dict[object, Callable[..., int | None]] = {
    **_MOVED,
    **dict.fromkeys(
        [
            *ELEMENTWISE,
            *named(
                "contiguous detach expand_as bernoulli_ add_ mul_ sub_ div_ relu_ silu_ copy_ fill_ zero_ "
                "clamp_ exp_ tanh_ sigmoid_ masked_fill_ neg_ sqrt_ square_ pow_",
                *BOTH,
            ),
            *named("__iadd__ __imul__ __isub__ __itruediv__", *BOTH),
            *named("dropout alpha_dropout", F),
        ],
        _pointwise,
    ),
    **dict.fromkeys(
        [
            *named(
                "mean var std amax amin max min argmax argmin prod any all logsumexp softmax log_softmax cumsum "
                "cumprod argsort sort median nanmean nansum count_nonzero cummax cummin logcumsumexp var_mean std_mean",
                *BOTH,
            ),
            *named("softmax log_softmax softmin", F),
        ],
        _along,
    ),
    **dict.fromkeys(named("sum", *BOTH), _total),
    **dict.fromkeys(named("unbind", *BOTH), _at(1, 0)),
    **dict.fromkeys(named("topk kthvalue", *BOTH), _at(2, -1)),
    **dict.fromkeys(named("norm", *BOTH), _at(2, None)),
    **dict.fromkeys(named("narrow index_select", *BOTH), _at(1, 0)),
    **dict.fromkeys(named("roll", *BOTH), _rolled),
    **dict.fromkeys(named("flip", *BOTH), _flipped),
    **dict.fromkeys([torch.Tensor.expand, *named("broadcast_to", *BOTH)], _expanded),
    **dict.fromkeys(named("tril triu", *BOTH), triangle),
    **dict.fromkeys(named("view_as_complex view_as_real", torch), as_complex),
    F.prelu: _by_slope,
    torch.linalg.vector_norm: _at(2, None),
    F.pad: _padded,
    F.normalize: _at(2, 1),
    **dict.fromkeys(named("layer_norm rms_norm", F, torch), _last),
    F.linear: _applied,
    **dict.fromkeys(named("matmul __matmul__ bmm", *BOTH), _product),
    F.scaled_dot_product_attention: _attended,
    **dict.fromkeys(named("repeat_interleave", *BOTH), _repeated),
    **dict.fromkeys(named("unsqueeze", *BOTH), unsqueezed),
    **dict.fromkeys(named("cat concat concatenate", torch), _joined),
    torch.stack: _stacked,
    torch.einsum: _summed,
    **dict.fromkeys(named("squeeze", *BOTH), squeezed),
    **dict.fromkeys(named("view_as reshape_as", torch.Tensor), _like_another),
    torch.Tensor.data.__get__: _same,  # type: ignore[attr-defined]
    **dict.fromkeys(named("to type type_as cpu cuda", torch.Tensor), _kept),
    **dict.fromkeys(
        named("requires_grad_ rand_like randn_like zeros_like ones_like empty_like full_like", *BOTH), _same
    ),
}
_JOINT = (_pointwise, _product, _applied, _joined, _stacked, _summed, _attended, _like_another)  # of several operands
_PARTS: dict[object, Callable[..., Cut | list[Cut]]] = {
    torch.Tensor.__getitem__: indexed,
    **dict.fromkeys(named("reshape view unflatten", *BOTH), reshaped),
    **dict.fromkeys(named("flatten", *BOTH), flattened),
    **dict.fromkeys(named("chunk tensor_split", *BOTH), taken_apart),
    **dict.fromkeys(named("split", *BOTH), functools.partial(taken_apart, by_size=True)),
    F.glu: gated,
}
# of what all ranks have alike these make what they have alike: no number that is given may be a rank's own
_ALIKE = {
    *(_along, _total, _last, _applied, _product, _attended, _joined, _stacked, _expanded, triangle, _kept, _same),
    *(_like_another, as_complex, unsqueezed, squeezed, reshaped, flattened),
}


def keeps_alike(func: Function, args: Operands, kwargs: Given) -> bool:
    """Tells whether ranks that give the same to a function get the same, if a number among it may be the rank's."""
    if func in ELEMENTWISE:
        return not any(isinstance(x, (int, float)) for x in (*args, *kwargs.values()))
    return func in _MOVED or _RULES.get(func, _PARTS.get(func)) in _ALIKE
