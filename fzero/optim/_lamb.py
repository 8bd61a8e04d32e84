"""LAMB: Adam's direction, of which each leaf takes as much as its norm allows (You et al. 2020, 1904.00962)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fzero.base.arguments import with_betas
from fzero.optim._adam import AdamState, adamw
from fzero.optim._clip import norm_of
from fzero.optim._whole import whole
from fzero.optim.base import Rated, need_hypers, rate
from fzero.table.needs import need_rate
from fzero.table.optimizer import GradientTransformation, Number, Schedule


@with_betas
def lamb(
    lr: Number | Schedule,
    b1: Number | Schedule = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-6,
    weight_decay: Number = 0.0,
) -> GradientTransformation:
    """LAMB: Adam's direction, scaled leaf by leaf to the norm of the params. For large batches.

    `p -= lr * norm(p) / norm(r) * r`, with `r = m̂ / (sqrt(v̂) + eps) + weight_decay * p`.

    If one of the norms is zero, their ratio counts as one, as in optax. Under ZeRO each leaf is updated on one rank, as
    with `fz.whole`.

    Source: You et al., 2020 (arXiv 1904.00962).

    Args:
        lr: learning rate, or a schedule: a function of the number of updates applied so far.
        b1: decay rate of the first moment, in [0, 1), or a schedule of it.
        b2: decay rate of the second moment, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: multiplied by the param and added to the direction before its norm is taken.

    Example:
        >>> optimizer = fz.lamb(0.1)
        >>> params = {"w": torch.tensor([3.0, 4.0])}
        >>> updates, state = optimizer.update({"w": torch.ones(2)}, optimizer.init(params), params)
        >>> updates["w"]
        tensor([-0.3536, -0.3536])
    """
    unit, least = "a number in [0, 1)", "at least 0"
    need_hypers("lamb", b1=(b1, unit), b2=(b2, unit), eps=(eps, least), weight_decay=(weight_decay, least))
    need_rate(lr, "lamb")
    own = _Lamb(lr, adamw(1.0, b1, b2, eps, weight_decay))
    return whole(GradientTransformation(own.direction.init, own.update, None, own.label, own.metrics))


@dataclass(frozen=True)
class _Lamb(Rated):
    lr: Number | Schedule
    direction: GradientTransformation  # of a rate of one
    name = "lamb"

    def update(
        self, grads: dict[str, torch.Tensor], old: AdamState, params: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], AdamState]:
        now = rate(self.lr, old.count.value)
        updates, new = self.direction.update(grads, old, params)
        ((path, u),), (p,) = updates.items(), params.values()
        own, its = norm_of(p), norm_of(u)
        ratio = torch.where((own > 0) & (its > 0), own / torch.where(its > 0, its, 1.0), 1.0)
        return {path: u * (now * ratio).to(u.dtype)}, new
