"""The functions of torch that go element by element, with broadcasting, and make a new tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fzero.table.handle import Function

BOTH = (torch.Tensor, torch)


def named(names: str, *owners: object) -> list[Function]:
    """The functions of these names, as far as there are any."""
    return [found for name in names.split() for owner in owners if (found := getattr(owner, name, None)) is not None]


ELEMENTWISE = [
    *named(
        "abs neg negative exp exp2 log log2 log1p expm1 sqrt rsqrt square sin cos tan tanh sigmoid relu erf erfc "
        "reciprocal sign floor ceil round add sub subtract mul multiply div divide true_divide rsub pow maximum "
        "minimum clamp clamp_min clamp_max where lerp addcmul addcdiv masked_fill nan_to_num eq ne lt le gt ge "
        "logical_and logical_or logical_not logical_xor isnan isinf isfinite clone to type_as float double half "
        "bfloat16 int long short bool trunc frac log10 sinh cosh asin acos atan asinh acosh atanh atan2 hypot xlogy "
        "erfinv logit remainder fmod floor_divide sgn lgamma digamma heaviside copysign bitwise_and bitwise_or "
        "bitwise_xor bitwise_not logaddexp logaddexp2 conj conj_physical "
        "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__ __invert__ __abs__ __mod__ __floordiv__ "
        "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__",
        *BOTH,
    ),
    *named(
        "relu gelu silu mish softplus elu selu celu leaky_relu relu6 hardtanh hardswish hardsigmoid logsigmoid "
        "softsign tanhshrink tanh sigmoid softshrink hardshrink threshold",
        F,
    ),
]
