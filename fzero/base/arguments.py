"""What a public function is given, held against what it takes: a wrong kind is named before it is used."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch

from fzero.base import pytree


def named(value: Any) -> str:
    """What a value is, in words."""
    if value is None:
        return "None"
    if isinstance(value, torch.nn.Module):
        return f"a module ({type(value).__name__})"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (bool, int, float, str)):
        return repr(value)
    return type(value).__name__


def wrong(who: str, argument: str, value: Any, expected: str) -> TypeError:
    """The error for an argument of a wrong kind."""
    return TypeError(f"{who}: got {argument}={named(value)}, expected {expected}.")


def need_bool(value: Any, who: str, argument: str, or_none: bool = False) -> None:
    if not (isinstance(value, bool) or (or_none and value is None)):
        raise wrong(who, argument, value, "True or False" + (" or None" if or_none else ""))


def need_str(value: Any, who: str, argument: str, expected: str, or_none: bool = False) -> None:
    if not (isinstance(value, str) or (or_none and value is None)):
        raise wrong(who, argument, value, expected)


def need_int(value: Any, who: str, argument: str, expected: str = "an int", least: int | None = None) -> None:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise wrong(who, argument, value, expected)
    if least is not None and value < least:  # type: ignore[operator]
        raise ValueError(f"{who}: got {argument}={value}, expected at least {least}.")


def need_number(value: Any, who: str, argument: str, expected: str = "a number") -> None:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise wrong(who, argument, value, expected)


def need_argnums(argnums: object, inputs: Sequence[object]) -> tuple[int, ...] | None:
    """The inputs to differentiate, counted from 0; negative ones count from the end, as in torch.func.grad."""
    if argnums is None:
        return None
    given = (argnums,) if isinstance(argnums, numbers.Integral) and not isinstance(argnums, bool) else argnums
    if not isinstance(given, (tuple, list)):
        raise wrong("step.vjp", "argnums", argnums, "an int, a tuple of ints or None")
    out = []
    for number in given:
        need_int(number, "step.vjp", "argnums", "an int, a tuple of ints or None")
        number = int(number)
        if not -len(inputs) <= number < len(inputs):
            raise ValueError(
                f"step.vjp: got argnums={argnums}, expected numbers of inputs, of which there are {len(inputs)} behind "
                f"the state: from {-len(inputs)} to {len(inputs) - 1}."
            )
        out.append(number % len(inputs))
    if len(set(out)) < len(out):
        raise ValueError(f"step.vjp: got argnums={argnums}, expected every input at most once.")
    for number in out:
        if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.leaves(inputs[number])):
            raise wrong("step.vjp", f"argnums={number} and input {number}", inputs[number], "one with a tensor")
    return tuple(out)


def need_norm(norm: Any, who: str) -> None:
    """A norm to clip by: None, a number or a 0-d tensor. One that is not finite skips the update."""
    expected = "None, a number or a 0-d tensor, such as fz.global_norm(grads, others)"
    if isinstance(norm, torch.Tensor):
        if norm.ndim or norm.is_complex():
            raise wrong(who, "grad_norm", norm, expected)
    elif norm is not None:
        need_number(norm, who, "grad_norm", expected)
        if math.isfinite(norm) and norm < 0:
            raise ValueError(f"{who}: got grad_norm={norm}, expected at least 0.")
