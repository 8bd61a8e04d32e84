"""Stochastic gradient descent with momentum (Polyak 1964; Nesterov 1983 by Sutskever et al. 2013), in torch's form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fzero.base import pytree
from fzero.base.arguments import need_bool
from fzero.formats.ops import Ops
from fzero.kernels.onepass import Load, T, Tensors
from fzero.optim.base import Elementwise, is_some, known, need_hypers
from fzero.table.optimizer import GradientTransformation, Number, Schedule


class SgdState(NamedTuple):
    """State of `fz.sgd`: number of applied updates, and the momentum buffers (a tree like the params) or None."""

    count: pytree.Count
    momentum: object = None


def sgd(
    lr: Number | Schedule, momentum: Number | None = None, weight_decay: Number = 0.0, nesterov: bool = False
) -> GradientTransformation:
    """Stochastic gradient descent with momentum, as `torch.optim.SGD`.

    `b = momentum * b + g`, then `p -= lr * b`. The weight decay is added to the gradient.

    Every number may be a 0-d tensor. Then `torch.func` can differentiate with respect to it.

    Source: Polyak, 1964; Nesterov's form by Sutskever et al., 2013.

    Args:
        lr: learning rate, or a schedule: a function of the number of updates applied so far. A negative one
            ascends. Behind another optimizer in `fz.chain`, it multiplies what that gives.
        momentum: decay rate of the buffer. None stores no buffer.
        weight_decay: multiplied by the param and added to the gradient.
        nesterov: step along `g + momentum * b` instead of `b`.

    Raises:
        ValueError: `nesterov=True` without a momentum. Give one, such as 0.9.

    Example:
        >>> optimizer = fz.sgd(0.5)
        >>> updates, _ = optimizer.update({"w": torch.ones(1)}, optimizer.init({"w": torch.ones(1)}), None)
        >>> updates["w"]
        tensor([-0.5000])
    """
    need_hypers("sgd", weight_decay=(weight_decay, "a number"))
    need_bool(nesterov, "sgd", "nesterov")
    moved = 0.0 if momentum is None else momentum
    need_hypers("sgd", momentum=(moved, "at least 0"))
    if nesterov and not is_some(moved):
        raise ValueError(f"sgd(nesterov=True): got momentum={momentum}, expected a momentum, such as 0.9.")
    own, moments = _Sgd(moved, weight_decay, nesterov), (False,) if is_some(moved) else ()
    formula = _nesterov if nesterov else _formula
    return Elementwise(
        "sgd, nesterov" if nesterov else "sgd",
        lr,
        SgdState,
        moments,
        own.direction,
        formula,
        own.hyper,
        own.kernel,
        coupled=weight_decay,
    ).transformation


@dataclass(frozen=True)
class _Sgd:
    momentum: Number
    weight_decay: Number
    nesterov: bool

    def direction(
        self, now: Number, count: int, g: torch.Tensor, b: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if b is not None and is_some(self.momentum):
            b = self.momentum * b + g
            g = g + self.momentum * b if self.nesterov else b
        return -now * g, b

    def kernel(self, now: float, count: int, params: Tensors, grads: Tensors, *buffers: Tensors) -> None:
        """To the bits of torch.optim.SGD."""
        if self.weight_decay:
            grads = torch._foreach_add(grads, params, alpha=known(self.weight_decay))
        for moved in buffers:
            torch._foreach_mul_(moved, known(self.momentum))
            torch._foreach_add_(moved, grads)
            grads = torch._foreach_add(grads, moved, alpha=known(self.momentum)) if self.nesterov else moved
        torch._foreach_add_(params, grads, alpha=-now)

    def hyper(self, now: float, count: int) -> Sequence[float]:
        return known(self.weight_decay), known(self.momentum), now


def _formula(o: Ops, h: Sequence[T], p: T, g: T, *buffer: Load) -> tuple[T, ...]:
    g = g * h[0] + h[1] * p
    if not buffer:
        return (p - h[3] * g,)
    moved = buffer[0](h[2]) + g
    return p - h[3] * moved, moved


def _nesterov(o: Ops, h: Sequence[T], p: T, g: T, buffer: Load) -> tuple[T, ...]:
    g = g * h[0] + h[1] * p
    moved = buffer(h[2]) + g
    return p - h[3] * (g + h[2] * moved), moved
