"""The operands of an operator that is looked at: between which values they lie, and which of them it writes to."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fzero.base import private, pytree
from fzero.base.operators import is_zero

Operator = Callable[..., object]


class Operand(NamedTuple):
    """A tensor that an operation takes, as it was before."""

    tensor: torch.Tensor
    low: float
    high: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


def is_plain(x: torch.Tensor) -> bool:
    """Tells whether a tensor's values can be looked at: real or complex numbers in memory of its own."""
    if not (x.is_floating_point() or x.is_complex()) or x.layout != torch.strided or x.is_quantized:
        return False
    if is_zero(x):
        return False
    return x.device.type != "meta" and not private.is_fake(x) and not private.is_dispatched(type(x))


def measured(x: torch.Tensor) -> Operand:
    x = x.detach()
    if not x.numel():
        return Operand(x, 0.0, 0.0)
    real = pytree.as_reals(x)
    low, high = torch.aminmax(real.float() if real.itemsize == 1 else real)
    return Operand(x, float(low), float(high))


@functools.lru_cache(4096)
def writes(func: Operator) -> bool:
    """Tells whether an operator writes to what it takes."""
    schema = getattr(func, "_schema", None)
    return schema is not None and any(x.alias_info is not None and x.alias_info.is_write for x in schema.arguments)


@functools.lru_cache(4096)
def makes_nothing(name: str) -> bool:
    """Tells whether an operator gives memory and writes nothing there, or is none."""
    return name.startswith(("prim.", "aten.empty", "aten.new_empty", "aten.set_", "aten.resize_"))


_OVERWRITING = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_")


def overwritten_by(name: str, given: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensor, all of its memory, whose values an operator writes over without reading them."""
    if not given or name.removeprefix("aten.").partition(".")[0] not in _OVERWRITING:
        return None
    return given[0]


def names_infinity(arguments: object) -> bool:
    """Tells whether an infinite number is among an operator's arguments."""
    return any(isinstance(x, float) and not math.isfinite(x) for x in pytree.flatten(arguments)[0])
