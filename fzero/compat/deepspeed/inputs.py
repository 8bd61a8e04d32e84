"""fz.compat.cast_inputs: a function whose floating inputs are cast."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from fzero.base import pytree
from fzero.base.arguments import wrong
from fzero.table.needs import need_function


def cast_inputs(fn: Callable[..., object], dtype: torch.dtype) -> Callable[..., object]:
    """A step's function with its floating inputs cast, as DeepSpeed's `fp16.auto_cast` does.

    Args:
        fn: `fn(params, *inputs) -> outputs`. Params are left as they are.
        dtype: what floating tensors in the inputs are cast to.

    Raises:
        TypeError: `fn` is no function, or `dtype` no floating dtype.

    Example:
        >>> fz.compat.cast_inputs(lambda p, x: x * p, torch.float16)(2, torch.ones(1))
        tensor([2.], dtype=torch.float16)
    """
    need_function(fn, "compat.cast_inputs")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise wrong("compat.cast_inputs", "dtype", dtype, "a floating dtype, such as torch.float16")
    return functools.partial(_called, fn, dtype)


def _called(fn: Callable[..., object], dtype: torch.dtype, params: object, *inputs: object) -> object:
    floating = lambda x: isinstance(x, torch.Tensor) and x.is_floating_point()
    return fn(params, *pytree.map(lambda x: x.to(dtype) if floating(x) else x, inputs))
