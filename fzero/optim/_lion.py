"""Lion: evolved sign momentum (Chen et al. 2023, algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fzero.base import pytree
from fzero.base.arguments import need_number
from fzero.formats.ops import Ops
from fzero.kernels.onepass import Load, T
from fzero.optim.base import elementwise, rate
from fzero.state.moments import zeros_like
from fzero.table.needs import need_rate
from fzero.table.optimizer import GradientTransformation, Schedule


class LionState(NamedTuple):
    """Applied updates, and the momentum."""

    count: pytree.Count
    mu: Any


def lion(lr: float | Schedule, b1: float = 0.9, b2: float = 0.99, weight_decay: float = 0.0) -> GradientTransformation:
    """p - lr * (sign(b1 * m + (1 - b1) * g) + weight_decay * p), then m = b2 * m + (1 - b2) * g.

    Args:
        lr: learning rate, or a schedule of the number of applied updates; about a tenth of AdamW's.
        b1, b2: interpolation for the update, decay of the momentum.
        weight_decay: decoupled, multiplied by the learning rate.

    Example:
        >>> optimizer = fz.lion(0.5)
        >>> updates, _ = optimizer.update({"w": torch.ones(1)}, optimizer.init({"w": torch.ones(1)}), None)
        >>> updates["w"]
        tensor([-0.5000])
    """

    need_rate(lr, "lion")
    for argument, value in (("b1", b1), ("b2", b2), ("weight_decay", weight_decay)):
        need_number(value, "lion", argument)
    for argument, value in (("b1", b1), ("b2", b2)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"lion({argument}=...): got {value}, expected a number in [0, 1].")
    if weight_decay < 0.0:
        raise ValueError(f"lion(weight_decay=...): got {weight_decay}, expected at least 0.")

    def init(params: Any) -> LionState:
        return LionState(pytree.Count(0), zeros_like(params))

    def update(grads: Any, state: LionState, params: Any = None) -> tuple[Any, LionState]:
        now = rate(lr, state.count.value)
        updates = pytree.map(lambda m, g: -now * (b1 * m + (1 - b1) * g).sign(), state.mu, grads)
        if weight_decay:
            updates = pytree.map(lambda u, p: u - now * weight_decay * p, updates, params)
        mu = pytree.map(lambda m, g: b2 * m + (1 - b2) * g, state.mu, grads)
        return updates, LionState(pytree.Count(state.count.value + 1), mu)

    def fused(params: Any, grads: Any, state: LionState) -> LionState:
        now = rate(lr, state.count.value)

        hyper = (b1, 1 - b1, b2, 1 - b2, 1 - now * weight_decay, now)
        elementwise(_formula, hyper, params, grads, state.mu)
        return LionState(pytree.Count(state.count.value + 1), state.mu)

    return GradientTransformation(
        init, update, fused, lambda _: "lion", lambda s: {"lr": rate(lr, s.count.value)}, by_leaf=True
    )


def _formula(o: Ops, h: Sequence[T], p: T, g: T, m: Load) -> tuple[T, T]:
    g = g * h[0]
    return p * h[5] - h[6] * o.sign(m(h[1]) + h[2] * g), m(h[3]) + h[4] * g
