"""Adam and AdamW (Kingma & Ba 2015; Loshchilov & Hutter 2019), on torch's fused kernels where dtypes allow.

AMSGrad is Reddi et al. 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fzero.base import pytree
from fzero.base.arguments import need_bool, with_betas
from fzero.base.follow import root
from fzero.formats.ops import Ops
from fzero.kernels.onepass import Load, T, Tensors
from fzero.optim.base import Elementwise, at, is_some, known, mixed, need_hypers
from fzero.table.optimizer import GradientTransformation, Number, Schedule


class AdamState(NamedTuple):
    """State of `fz.adamw`: number of applied updates, first and second moments (trees like the params)."""

    count: pytree.Count
    mu: object
    nu: object


class AmsgradState(NamedTuple):
    """State of AMSGrad: as AdamState, and the elementwise maximum of the second moments so far."""

    count: pytree.Count
    mu: object
    nu: object
    largest: object


@with_betas
def adamw(
    lr: Number | Schedule,
    b1: Number | Schedule = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    weight_decay: Number = 0.01,
    amsgrad: bool = False,
) -> GradientTransformation:
    """Adam with decoupled weight decay, as `torch.optim.AdamW`.

    `p -= lr * (m̂ / (sqrt(v̂) + eps) + weight_decay * p)`

    Every number may be a 0-d tensor. Then `torch.func` can differentiate with respect to it.

    Source: Kingma & Ba, 2015 (arXiv 1412.6980); Loshchilov & Hutter, 2019 (arXiv 1711.05101); AMSGrad: Reddi et al.,
    2018.

    Args:
        lr: learning rate, or a schedule: a function of the number of updates applied so far.
        b1: decay rate of the first moment, in [0, 1), or a schedule of it.
        b2: decay rate of the second moment, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled. It is multiplied by the learning rate.
        amsgrad: divide by the root of the largest second moment so far. This stores a third moment.

    Example:
        >>> optimizer = fz.adamw(0.1, weight_decay=0.0)
        >>> params = {"w": torch.tensor([1.0])}
        >>> updates, state = optimizer.update({"w": torch.tensor([2.0])}, optimizer.init(params), params)
        >>> round(updates["w"].item(), 4)
        -0.1
    """
    return _adam(lr, b1, b2, eps, weight_decay, True, amsgrad)


@with_betas
def adam(
    lr: Number | Schedule,
    b1: Number | Schedule = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    amsgrad: bool = False,
) -> GradientTransformation:
    """Adam, as `torch.optim.Adam`. A weight decay is added to the gradient.

    `p -= lr * m̂ / (sqrt(v̂) + eps)`, with moments of `g + weight_decay * p`. For decoupled decay take `fz.adamw`.

    Every number may be a 0-d tensor. Then `torch.func` can differentiate with respect to it.

    Source: Kingma & Ba, 2015 (arXiv 1412.6980); AMSGrad: Reddi et al., 2018.

    Args:
        lr: learning rate, or a schedule: a function of the number of updates applied so far.
        b1: decay rate of the first moment, in [0, 1), or a schedule of it.
        b2: decay rate of the second moment, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: multiplied by the param and added to the gradient.
        amsgrad: divide by the root of the largest second moment so far. This stores a third moment.

    Example:
        >>> fz.adam(1e-3).init({"w": torch.zeros(2)}).count
        Count(0)
    """
    return _adam(lr, b1, b2, eps, weight_decay, False, amsgrad)


def _adam(
    lr: Number | Schedule, b1: Number | Schedule, b2: Number, eps: Number, weight_decay: Number, decoupled: bool,
    amsgrad: bool,
) -> GradientTransformation:  # fmt: skip
    unit, least = "a number in [0, 1)", "at least 0"
    who = "adamw" if decoupled else "adam"
    need_bool(amsgrad, who, "amsgrad")
    need_hypers(who, b1=(b1, unit), b2=(b2, unit), eps=(eps, least), weight_decay=(weight_decay, least))

    own = _Adam(b1, b2, eps, weight_decay, decoupled)
    formula = _decoupled if decoupled else _coupled if is_some(weight_decay) else _undecayed
    name = "adamw, no decay" if decoupled and not is_some(weight_decay) else who
    return Elementwise(
        f"{name}, amsgrad" if amsgrad else name,
        lr,
        AmsgradState if amsgrad else AdamState,
        (False, True, True) if amsgrad else (False, True),
        own.direction,
        formula,
        own.hyper,
        own.kernel,
        generated=True,  # torch's takes three times as long on CPU as what the formula becomes
        **{"decoupled" if decoupled else "coupled": weight_decay},
    ).transformation


@dataclass(frozen=True)
class _Adam:
    b1: Number | Schedule
    b2: Number
    eps: Number
    weight_decay: Number
    decoupled: bool

    def direction(
        self, now: Number, count: int, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, *largest: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        b1, b2 = at(self.b1, count), self.b2
        m = mixed(m, g, b1)
        if isinstance(b2, torch.Tensor):
            v = b2 * v + (1 - b2) * g * g
        else:
            v = torch.addcmul(b2 * v, g, g, value=1 - b2)
        largest = tuple([torch.maximum(most, v) for most in largest])
        below = root(largest[0] if largest else v) * (1 - b2**count) ** -0.5 + self.eps
        return m * (-now / (1 - b1**count)) / below, m, v, *largest

    def kernel(
        self, now: float, count: int, params: Tensors, grads: Tensors, mu: Tensors, nu: Tensors, *largest: Tensors
    ) -> None:
        fused = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        b1, b2, decay, eps = map(known, (at(self.b1, count), self.b2, self.weight_decay, self.eps))
        steps = [torch.tensor(float(count), device=params[0].device)] * len(params)
        fused(
            params, grads, mu, nu, [x for own in largest for x in own], steps, lr=now, beta1=b1, beta2=b2,
            weight_decay=decay, eps=eps, amsgrad=bool(largest), maximize=False,
        )  # fmt: skip

    def hyper(self, now: float, count: int) -> Sequence[float]:
        b1, b2, decay, eps = map(known, (at(self.b1, count), self.b2, self.weight_decay, self.eps))
        decay, root = 1 - now * decay if self.decoupled else decay, (1 - b2**count) ** 0.5
        return b1, 1 - b1, b2, (1 - b2) ** 0.5, decay, -now * root / (1 - b1**count), eps * root


def _moments(g: T, h: Sequence[T], m: Load, v: Load, times: T | float = 1.0) -> tuple[T, T]:
    part = g * (times * h[4])
    return g * (times * h[2]) + m(h[1]), part * part + v(h[3])


def _stepped(o: Ops, h: Sequence[T], p: T, m: T, v: T, largest: Sequence[Load]) -> tuple[T, ...]:
    """The param, and all moments."""
    most = [o.where(v >= before, v, before) for before in [load() for load in largest]]
    return (p + m / (o.sqrt(most[0] if most else v) + h[7]) * h[6], m, v, *most)


def _decoupled(o: Ops, h: Sequence[T], p: T, g: T, m: Load, v: Load, *largest: Load) -> tuple[T, ...]:
    return _stepped(o, h, p * h[5], *_moments(g, h, m, v, h[0]), largest)


def _coupled(o: Ops, h: Sequence[T], p: T, g: T, m: Load, v: Load, *largest: Load) -> tuple[T, ...]:
    return _stepped(o, h, p, *_moments(g * h[0] + p * h[5], h, m, v), largest)


def _undecayed(o: Ops, h: Sequence[T], p: T, g: T, m: Load, v: Load, *largest: Load) -> tuple[T, ...]:
    return _stepped(o, h, p, *_moments(g, h, m, v, h[0]), largest)
