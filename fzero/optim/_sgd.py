"""Stochastic gradient descent with momentum (Polyak 1964; torch.optim.SGD's form)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fzero.base import pytree
from fzero.base.arguments import need_number
from fzero.formats.ops import Ops
from fzero.kernels.onepass import Load, T
from fzero.optim.base import elementwise, rate
from fzero.state.moments import zeros_like
from fzero.table.needs import need_rate
from fzero.table.optimizer import GradientTransformation, Schedule


class SgdState(NamedTuple):
    """Applied updates, and the momentum buffer or None."""

    count: pytree.Count
    momentum: Any


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

    need_rate(lr, "sgd")
    need_number(weight_decay, "sgd", "weight_decay")
    if momentum is not None:
        need_number(momentum, "sgd", "momentum", "a number or None")

    def init(params: Any) -> SgdState:
        return SgdState(pytree.Count(0), zeros_like(params) if momentum else None)

    def update(grads: Any, state: SgdState, params: Any = None) -> tuple[Any, SgdState]:
        now = rate(lr, state.count.value)
        if weight_decay:
            grads = pytree.map(lambda g, p: g + weight_decay * p, grads, params)
        buffer = pytree.map(lambda b, g: momentum * b + g, state.momentum, grads) if momentum else None
        updates = pytree.map(lambda b: -now * b, buffer if momentum else grads)
        return updates, SgdState(pytree.Count(state.count.value + 1), buffer)

    def fused(params: Any, grads: Any, state: SgdState) -> SgdState:
        now = rate(lr, state.count.value)

        moments = [state.momentum] if momentum else []

        def one(p: torch.Tensor, g: torch.Tensor, *buffer: torch.Tensor) -> None:  # to the bits of torch.optim.SGD
            if weight_decay:
                g = g + weight_decay * p
            if buffer:
                buffer[0].mul_(momentum or 0.0).add_(g)
            p.add_(buffer[0] if buffer else g, alpha=-now)

        elementwise(_formula, (weight_decay, momentum or 0.0, now), params, grads, *moments, kernel=one)
        return SgdState(pytree.Count(state.count.value + 1), state.momentum)

    return GradientTransformation(
        init, update, fused, lambda _: "sgd", lambda s: {"lr": rate(lr, s.count.value)}, by_leaf=True
    )


def _formula(o: Ops, h: Sequence[T], p: T, g: T, *buffer: Load) -> tuple[T, ...]:
    g = g * h[0] + h[1] * p
    if not buffer:
        return (p - h[3] * g,)
    moved = buffer[0](h[2]) + g
    return p - h[3] * moved, moved
