"""Lion: evolved sign momentum (Chen et al. 2023, algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fzero.base import pytree
from fzero.formats.ops import Ops
from fzero.kernels.onepass import Load, T
from fzero.optim.base import Elementwise, need_hypers
from fzero.table.optimizer import GradientTransformation, Schedule


class LionState(NamedTuple):
    """Applied updates, and the momentum."""

    count: pytree.Count
    mu: object


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
    unit = "a number in [0, 1]"
    need_hypers("lion", b1=(b1, unit), b2=(b2, unit), weight_decay=(weight_decay, "at least 0"))

    own = _Lion(b1, b2, weight_decay)
    return Elementwise(
        "lion", lr, LionState, (False,), own.direction, _formula, own.hyper, decoupled=weight_decay
    ).transformation


@dataclass(frozen=True)
class _Lion:
    b1: float
    b2: float
    weight_decay: float

    def direction(self, now: float, count: int, grads: object, mu: object) -> tuple[object, object]:
        b1, b2 = self.b1, self.b2
        updates = pytree.map(lambda m, g: -now * (b1 * m + (1 - b1) * g).sign(), mu, grads)
        return updates, pytree.map(lambda m, g: b2 * m + (1 - b2) * g, mu, grads)

    def hyper(self, now: float, count: int) -> Sequence[float]:
        return self.b1, 1 - self.b1, self.b2, 1 - self.b2, 1 - now * self.weight_decay, now


def _formula(o: Ops, h: Sequence[T], p: T, g: T, m: Load) -> tuple[T, T]:
    g = g * h[0]
    return p * h[5] - h[6] * o.sign(m(h[1]) + h[2] * g), m(h[3]) + h[4] * g
