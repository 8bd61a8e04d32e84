"""Adafactor: second moments as factors of rows and columns (Shazeer & Stern 2018, 1804.04235), as torch has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fzero.base import pytree
from fzero.base.arguments import need_number, wrong
from fzero.base.follow import root
from fzero.optim._whole import whole
from fzero.optim.base import Rated, less, need_hypers, rate
from fzero.table.needs import need_rate
from fzero.table.optimizer import GradientTransformation, Number, Schedule


class AdafactorState(NamedTuple):
    """State of `fz.adafactor` for one leaf: number of applied updates, and means of squared gradients.

    They are means over rows [..., rows, 1] and columns [..., 1, columns]. A leaf with fewer than two dims has
    `elements` instead, of its own shape.
    """

    count: pytree.Count
    rows: object
    columns: object
    elements: object


def adafactor(
    lr: Number | Schedule = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: Number = 1.0,
    weight_decay: Number = 0.0,
) -> GradientTransformation:
    """Adafactor: second moments stored as factors of rows and columns, as `torch.optim.Adafactor`.

    `p -= a * u / max(1, rms(u) / d)`, with `u = g / sqrt(v)` and `a = max(eps[1], rms(p)) * min(lr, 1 / sqrt(t))` in
    update t.

    A leaf [n, m] needs n + m numbers of state instead of n * m. Leaves with more dims are factored over the last two.
    It works on whole leaves: under ZeRO each leaf is updated on one rank, as with `fz.whole`.

    Source: Shazeer & Stern, 2018 (arXiv 1804.04235).

    Args:
        lr: the largest learning rate, or a schedule: a function of the number of updates applied so far.
        beta2_decay: the second moment is `v = lerp(v, g * g, t ** beta2_decay)`.
        eps: two lower bounds: of sqrt(v) (None: the eps of the dtype that is computed in) and of rms(p).
        d: the largest root mean square of an update.
        weight_decay: decoupled. It is multiplied by the learning rate.

    Example:
        >>> optimizer = fz.adafactor(0.1)
        >>> params = {"w": torch.ones(2, 3)}
        >>> updates, state = optimizer.update({"w": torch.ones(2, 3)}, optimizer.init(params), params)
        >>> updates["w"][0], state.rest["w"].rows.shape
        (tensor([-0.1000, -0.1000, -0.1000]), torch.Size([2, 1]))
    """
    need_rate(lr, "adafactor")
    need_hypers("adafactor", d=(d, "a positive number"), weight_decay=(weight_decay, "at least 0"))
    need_number(beta2_decay, "adafactor", "beta2_decay")
    if not isinstance(eps, (tuple, list)) or len(eps) != 2:
        raise wrong("adafactor", "eps", eps, "two numbers, or None and a number")
    first, second = eps
    for number in [second] if first is None else eps:
        need_number(number, "adafactor", "eps", "two numbers, or None and a number")
    least = {} if first is None else {"eps[0]": (first, "a positive number")}
    need_hypers("adafactor", **least, **{"eps[1]": (second, "at least 0")})  # type: ignore[arg-type]
    own = _Adafactor(lr, beta2_decay, first, second, d, weight_decay)
    inner = GradientTransformation(_begun, own.update, None, own.label, own.metrics)
    return whole(inner)


def _begun(params: dict[str, torch.Tensor]) -> AdafactorState:
    (p,) = params.values()
    if p.ndim < 2:
        return AdafactorState(pytree.Count(0), None, None, torch.zeros_like(p))
    row, column = (*p.shape[:-1], 1), (*p.shape[:-2], 1, p.shape[-1])
    return AdafactorState(pytree.Count(0), p.new_zeros(row), p.new_zeros(column), None)


@dataclass(frozen=True)
class _Adafactor(Rated):
    lr: Number | Schedule
    beta2_decay: float
    first: float | None
    second: float
    d: Number
    weight_decay: Number
    name = "adafactor"

    def update(
        self, grads: dict[str, torch.Tensor], old: AdafactorState, params: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], AdafactorState]:
        ((path, g),), (p,) = grads.items(), params.values()
        now, count = rate(self.lr, old.count.value), old.count.own()(path) + 1
        first = torch.finfo(p.dtype).eps if self.first is None else self.first
        new, most = count**self.beta2_decay, 1.0 / count**0.5
        if isinstance(most, torch.Tensor):  # in a function's graph
            new, step = new.to(p), most.clamp(max=now)
        else:
            step = now.clamp(max=most) if isinstance(now, torch.Tensor) else min(now, most)
        step = step * _rms(p).clamp(min=self.second)
        rows, columns, elements = old.rows, old.columns, old.elements
        if isinstance(rows, torch.Tensor) and isinstance(columns, torch.Tensor):
            rows = rows.lerp(g.square().mean(-1, keepdim=True), new)
            columns = columns.lerp(g.square().mean(-2, keepdim=True), new)
            v = rows @ columns / rows.mean(-2, keepdim=True).clamp(min=first)
        else:
            assert isinstance(elements, torch.Tensor)
            v = elements = elements.lerp(g.square(), new)
        u = g * v.clamp(min=first * first).rsqrt()
        update = -step / (_rms(u) / self.d).clamp(min=1.0) * u
        update = less(update, now * self.weight_decay, p)
        return {path: update}, AdafactorState(old.count.next(), rows, columns, elements)


def _rms(x: torch.Tensor) -> torch.Tensor:
    return root(x.square().sum() / max(1, x.numel()))
