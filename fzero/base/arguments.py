"""Arguments of public functions are held against what these take: a wrong kind is named before it is used."""

from __future__ import annotations

import functools
import math
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from fzero.base import pytree

P = ParamSpec("P")
T = TypeVar("T")


def named(value: object) -> str:
    """A value in words."""
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


def wrong(who: str, argument: str, value: object, expected: str) -> TypeError:
    return TypeError(f"{who}: got {argument}={named(value)}, expected {expected}.")


def need_bool(value: object, who: str, argument: str, or_none: bool = False) -> None:
    if not (isinstance(value, bool) or (or_none and value is None)):
        raise wrong(who, argument, value, "True or False" + (" or None" if or_none else ""))


def need_str(value: object, who: str, argument: str, expected: str, or_none: bool = False) -> None:
    if not (isinstance(value, str) or (or_none and value is None)):
        raise wrong(who, argument, value, expected)


def need_int(value: object, who: str, argument: str, expected: str = "an int", least: int | None = None) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise wrong(who, argument, value, expected)
    if least is not None and int(value) < least:
        raise ValueError(f"{who}: got {argument}={value}, expected at least {least}.")
    return int(value)


def need_number(value: object, who: str, argument: str, expected: str = "a number") -> numbers.Real:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise wrong(who, argument, value, expected)
    return value


def as_float64(value: Any) -> torch.Tensor:
    """A number as a 0-d tensor, on the CPU whatever torch's default device is; a tensor stays where it is."""
    if isinstance(value, torch.Tensor):
        return torch.as_tensor(value, dtype=torch.float64, device=value.device)  # and no number in a trace
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def need_argnums(argnums: object, inputs: Sequence[object]) -> tuple[int, ...] | None:
    """The inputs to differentiate, counted from 0; negative ones count from the end, as in torch.func.grad."""
    if argnums is None:
        return None
    several, count = argnums if isinstance(argnums, (tuple, list)) else (argnums,), len(inputs)
    given = [need_int(number, "step.vjp", "argnums", "an int, a tuple of ints or None") for number in several]
    if not all(-count <= number < count for number in given):
        raise ValueError(
            f"step.vjp: got argnums={argnums}, expected numbers of inputs, of which there are {count} behind the "
            f"state: from {-count} to {count - 1}."
        )
    out = tuple(number % count for number in given)
    if len(set(out)) < len(out):
        raise ValueError(f"step.vjp: got argnums={argnums}, expected every input at most once.")
    for number in out:
        if not any(map(pytree.is_tensor, pytree.leaves(inputs[number]))):
            raise wrong("step.vjp", f"argnums={number} and input {number}", inputs[number], "one with a tensor")
    return out


def need_path(path: object, who: str, argument: str = "path", what: str = "the path of a folder") -> str:
    """A path, as a str."""
    given = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(given, str):
        raise wrong(who, argument, path, f"{what}, a str or an os.PathLike of one")
    if not given or "\0" in given:
        raise ValueError(f"{who}: got {argument}={given!r}, expected {what}.")
    return given


def with_betas(make: Callable[P, T]) -> Callable[P, T]:
    """Names b1= and b2= to whoever gives an optimizer torch's betas=."""

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> T:
        if "betas" in kwargs:
            raise TypeError(
                f"{make.__name__}: got betas=, expected b1= and b2=: fz.{make.__name__}(lr, b1=0.9, b2=0.99)."
            )
        return make(*args, **kwargs)

    return made


def by_new_names(who: str, given: Mapping[str, T], **newer: str) -> dict[str, T]:
    """Arguments by the names that they have here; `newer` says them for other ones: of torch, optax, or until 1.0."""
    out = dict(given)
    for old, new in newer.items():
        if old in out:
            if new in out:
                raise TypeError(f"{who}: got {old}= and {new}=, which are one argument; expected {new}= alone.")
            out[new] = out.pop(old)
    return out


def renamed(**newer: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Lets a function take arguments by other names, too: the older ones until 1.0, or those of torch and optax."""

    def around(make: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(make)
        def made(*args: P.args, **kwargs: P.kwargs) -> T:
            return make(*args, **by_new_names(make.__name__, kwargs, **newer))  # type: ignore[arg-type]

        return made

    return around


def need_norm(norm: object, who: str) -> None:
    """A norm to clip by must be None, a number or a 0-d tensor; one that is not finite skips the update."""
    expected = "None, a number or a 0-d tensor, such as fz.global_norm(grads, others)"
    if isinstance(norm, torch.Tensor):
        if norm.ndim or norm.is_complex():
            raise wrong(who, "grad_norm", norm, expected)
    elif norm is not None:
        number = need_number(norm, who, "grad_norm", expected)
        if math.isfinite(number) and number < 0:
            raise ValueError(f"{who}: got grad_norm={norm}, expected at least 0.")
