"""Derivatives of several orders of a function, in directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def derivatives(fn: Callable[[Any], Any], x: Any, along: Any, cotangent: Any = None) -> dict[str, Any]:
    """Everything that a function of a pytree of tensors owes; a loss without a cotangent."""
    f, value = torch.func, fn(x)
    cotangent = torch.ones_like(value) if cotangent is None else cotangent

    def pulled(x: Any) -> Any:
        return f.vjp(fn, x)[1](cotangent)[0]  # type: ignore[misc]

    def pulled_twice(x: Any) -> Any:
        return f.vjp(pulled, x)[1](along)[0]  # type: ignore[misc]

    return {
        "value": value,
        "vjp": pulled(x),
        "jvp": f.jvp(fn, (x,), (along,))[1],
        "jvp of vjp": f.jvp(pulled, (x,), (along,))[1],
        "vjp of vjp": pulled_twice(x),
        "third": f.jvp(pulled_twice, (x,), (along,))[1],
    }
