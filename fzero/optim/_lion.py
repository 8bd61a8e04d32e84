"""Lion: evolved sign momentum (Chen et al. 2023, algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fzero.base import pytree
from fzero.base.arguments import with_betas
from fzero.formats.ops import Ops
from fzero.kernels.onepass import Load, T
from fzero.optim.base import Elementwise, at, known, mixed, need_hypers
from fzero.table.optimizer import GradientTransformation, Number, Schedule


class LionState(NamedTuple):
    """State of `fz.lion`: number of applied updates, and the momentum (a tree like the params)."""

    count: pytree.Count
    mu: object


@with_betas
def lion(
    lr: Number | Schedule, b1: Number | Schedule = 0.9, b2: Number = 0.99, weight_decay: Number = 0.0
) -> GradientTransformation:
    """Lion: the sign of a momentum. It stores one moment, where Adam stores two.

    `p -= lr * (sign(b1 * m + (1 - b1) * g) + weight_decay * p)`, then `m = b2 * m + (1 - b2) * g`.

    Every number may be a 0-d tensor. Then `torch.func` can differentiate with respect to it.

    Source: Chen et al., 2023 (arXiv 2302.06675), algorithm 2.

    Args:
        lr: learning rate, or a schedule: a function of the number of updates applied so far. Start with about a tenth
            of AdamW's.
        b1: weight of the momentum in the direction, in [0, 1], or a schedule of it.
        b2: decay rate of the momentum, in [0, 1].
        weight_decay: decoupled. It is multiplied by the learning rate.

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
    b1: Number | Schedule
    b2: Number
    weight_decay: Number

    def direction(
        self, now: Number, count: int, g: torch.Tensor, m: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return -now * mixed(m, g, at(self.b1, count)).sign(), mixed(m, g, self.b2)

    def hyper(self, now: float, count: int) -> Sequence[float]:
        b1, b2, decay = map(known, (at(self.b1, count), self.b2, self.weight_decay))
        return b1, 1 - b1, b2, 1 - b2, 1 - now * decay, now


def _formula(o: Ops, h: Sequence[T], p: T, g: T, m: Load) -> tuple[T, T]:
    g = g * h[0]
    return p * h[5] - h[6] * o.sign(m(h[1]) + h[2] * g), m(h[3]) + h[4] * g
