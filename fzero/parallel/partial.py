"""Sums over a dim that is cut, of which each rank has its part; what is linear leaves them so."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from fzero.base import pytree
from fzero.parallel.cut_shapes import Given, Mixed, input_of
from fzero.parallel.elementwise import BOTH, named
from fzero.table.handle import Function, Operands
from fzero.table.placements import Cut

PARTIAL = Cut(0)  # in the place of how a tensor is cut: it is as large as the whole
# of one tensor, or of several that are all parts of sums
SUMS = frozenset(named("add sub subtract __add__ __radd__ __sub__ __rsub__", *BOTH))
_ADDED = frozenset(
    {
        *(*SUMS, torch.Tensor.__getitem__, torch.Tensor.mT.__get__, torch.Tensor.T.__get__),  # type: ignore[attr-defined]
        *named("neg __neg__ clone contiguous detach sum mean to float double half bfloat16 view reshape", *BOTH),
        *named("flatten unflatten transpose permute movedim unsqueeze squeeze expand chunk split unbind", *BOTH),
        *named("cat concat stack t swapaxes narrow select index_select", *BOTH),
    }
)
SCALED = frozenset(named("mul multiply __mul__ __rmul__", *BOTH))
_DIVIDED = frozenset(named("div divide true_divide __truediv__", *BOTH))
_PRODUCTS = frozenset([F.linear, torch.einsum, *named("matmul __matmul__ bmm mm mv", *BOTH)])
_BENDING = frozenset(
    named(
        "abs acos acosh asin asinh atan atanh celu clamp clamp_max clamp_min cos cosh elu erf erfc exp exp2 expm1 gelu "
        "hardshrink hardsigmoid hardtanh leaky_relu log log10 log1p log2 logit maximum minimum mish pow reciprocal "
        "relu relu6 rsqrt selu sigmoid silu sin sinc sinh softplus softshrink sqrt square tan tanh threshold softmax "
        "log_softmax layer_norm rms_norm amax amin max min logsumexp var std scaled_dot_product_attention __pow__",
        *BOTH,
        F,
    )
)


def bends(func: Function) -> bool:
    """Tells whether a function of a sum is known to be no sum of the function of its parts."""
    return func in _BENDING or func in _DIVIDED


def given_bias(args: Operands, kwargs: Mapping[str, object]) -> object:
    """That of linear(x, weight, bias)."""
    return kwargs.get("bias", args[2] if len(args) > 2 else None)


def behind_partial(
    func: Function, args: Operands, kwargs: Given, out: object, cut_of: Callable[[object], Cut | None]
) -> Cut:
    """What comes of parts of sums.

    Raises:
        Mixed: of the parts comes something else than of the sums.
    """
    given = pytree.leaves((args, kwargs))
    cuts = [cut_of(x) for x in given if isinstance(x, torch.Tensor)]
    if func in _ADDED:
        numbers = [x for name, x in (*enumerate(args), *kwargs.items()) if name != "alpha" and isinstance(x, _NUMBERS)]
        fits = all(cut == PARTIAL for cut in cuts) and not (func in SUMS and any(numbers))
    elif func in SCALED or (func in _PRODUCTS and not (func is F.linear and given_bias(args, kwargs) is not None)):
        fits = cuts.count(PARTIAL) == 1
    else:
        fits = func in _DIVIDED and cut_of(input_of(args, kwargs)) == PARTIAL and cuts.count(PARTIAL) == 1
        fits = fits and kwargs.get("rounding_mode") is None
    others = [cut for cut in cuts if cut is not None and cut != PARTIAL]
    rounded = [x for x in pytree.leaves(out) if isinstance(x, torch.Tensor) and not pytree.is_real(x)]
    if others or rounded or not fits:
        raise Mixed
    return PARTIAL


_NUMBERS = (int, float, complex)
