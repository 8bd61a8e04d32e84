"""Where values that are not finite begin, and which of these is the fault; and what an operator is given and does."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fzero.base import private, pytree
from fzero.base.operators import is_zero
from fzero.explaining.report import Fault

NAN, INF = "nan", "inf"
Operator = Callable[..., object]


@dataclass(slots=True)
class Taint:
    """The births that NaN and infinities in some memory come of, each with examples by their number in a microbatch."""

    nan: frozenset[Fault] = frozenset()
    inf: frozenset[Fault] = frozenset()

    def joined(self, other: Taint) -> Taint:
        return Taint(self.nan | other.nan, self.inf | other.inf)


def fault_of(taint: Taint) -> Fault | None:
    """The first birth of what is not finite in a result; None where nothing is.

    An infinity that somebody wanted is no fault, but the NaN that is made of it.
    """
    births = taint.nan or taint.inf
    return min([each for each in births if not each.given] or births, key=lambda each: each.at, default=None)


def kinds_of(x: torch.Tensor) -> tuple[bool, bool]:
    """Whether a tensor of real numbers has NaN, and infinities."""
    return bool(x.isnan().any()), bool(x.isinf().any())


def examples_of(x: torch.Tensor, batch: int | None) -> tuple[int, ...]:
    """The examples whose values are not all finite; none where no dim is that of examples.

    Args:
        x: [examples, ...], or [examples * others, ...], or with the dim of examples elsewhere.
        batch: how many examples there are; None where that is not known.
    """
    if not batch or not x.ndim or not x.numel():
        return ()
    if x.shape[0] % batch == 0:
        rows = x.reshape(batch, -1)
    elif batch in x.shape[1:]:
        rows = x.movedim(1 + x.shape[1:].index(batch), 0).reshape(batch, -1)
    else:
        return ()
    return tuple((~rows.isfinite()).any(1).nonzero().view(-1).tolist())


def described(x: torch.Tensor, low: float, high: float, kinds: Sequence[bool]) -> str:
    """A tensor in words: its shape, its dtype, and between which values it lies."""
    what = " and ".join(word for word, has in zip(("NaN", "infinities"), kinds, strict=True) if has)
    values = f"with {what}" if what else f"in [{low:.4g}, {high:.4g}]"
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} {values}"


# ---- operators and their operands


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


# what gives memory and writes nothing there, or is no operator
MAKES_NOTHING = ("prim.", "aten.empty", "aten.new_empty", "aten.set_", "aten.resize_")
_OVERWRITING = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_")


def overwritten_by(name: str, given: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensor, all of its memory, whose values an operator writes over without reading them."""
    if not given or name.removeprefix("aten.").partition(".")[0] not in _OVERWRITING:
        return None
    return given[0]
