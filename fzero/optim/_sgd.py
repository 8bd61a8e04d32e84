"""Stochastic gradient descent with momentum (Polyak 1964; torch.optim.SGD's form)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fzero.base import pytree
from fzero.base.arguments import need_number
from fzero.formats.ops import Ops
from fzero.kernels.onepass import Load, T
from fzero.optim.base import Elementwise, need_hypers
from fzero.table.optimizer import GradientTransformation, Schedule


class SgdState(NamedTuple):
    """Applied updates, and the momentum buffer or None."""

    count: pytree.Count
    momentum: object = None


def sgd(lr: float | Schedule, momentum: float | None = None, weight_decay: float = 0.0) -> GradientTransformation:
    """p - lr * b with b = momentum * b + g, as torch.optim.SGD; the weight decay is added to the gradient.

    Args:
        lr: learning rate, or a schedule of the number of applied updates.
        momentum: None keeps no buffer.
        weight_decay: coupled, as in torch.

    Example:
        >>> optimizer = fz.sgd(0.5)
        >>> updates, _ = optimizer.update({"w": torch.ones(1)}, optimizer.init({"w": torch.ones(1)}), None)
        >>> updates["w"]
        tensor([-0.5000])
    """
    need_hypers("sgd", weight_decay=(weight_decay, "a number"))
    if momentum is not None:
        need_number(momentum, "sgd", "momentum", "a number or None")
    own, moments = _Sgd(momentum or 0.0, weight_decay), (False,) if momentum else ()
    return Elementwise(
        "sgd", lr, SgdState, moments, own.direction, _formula, own.hyper, own.kernel, coupled=weight_decay
    ).transformation


@dataclass(frozen=True)
class _Sgd:
    momentum: float
    weight_decay: float

    def direction(self, now: float, count: int, grads: object, buffer: object) -> tuple[object, object]:
        if self.momentum:
            grads = buffer = pytree.map(lambda b, g: self.momentum * b + g, buffer, grads)
        return pytree.map(lambda g: -now * g, grads), buffer

    def kernel(self, now: float, count: int, p: torch.Tensor, g: torch.Tensor, *buffer: torch.Tensor) -> None:
        """To the bits of torch.optim.SGD."""
        if self.weight_decay:
            g = g + self.weight_decay * p
        for moved in buffer:
            g = moved.mul_(self.momentum).add_(g)
        p.add_(g, alpha=-now)

    def hyper(self, now: float, count: int) -> Sequence[float]:
        return self.weight_decay, self.momentum, now


def _formula(o: Ops, h: Sequence[T], p: T, g: T, *buffer: Load) -> tuple[T, ...]:
    g = g * h[0] + h[1] * p
    if not buffer:
        return (p - h[3] * g,)
    moved = buffer[0](h[2]) + g
    return p - h[3] * moved, moved
