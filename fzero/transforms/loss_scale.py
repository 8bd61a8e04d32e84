"""Loss scaling for float16 (Micikevicius et al. 2018): cotangents are scaled on the way in, grads carry the scale."""

from __future__ import annotations

import functools
import math
import operator
from typing import NamedTuple

from fzero.base.arguments import named, need_int, need_number
from fzero.table.spec import Extra, S, need_step


class ScaleState(NamedTuple):
    """The loss scale, and how many updates in a row were finite since it last changed."""

    scale: float
    finite: int = 0


def loss_scale(
    step: S, scale: float | str = "dynamic", *, initial: float = 2.0**16, interval: int = 2000, minimum: float = 1.0
) -> S:
    """Multiplies every cotangent by a scale inside the pullback; grads carry it, and `update` and `gather` take it off.

    Outputs, metrics and input cotangents are never scaled. An update whose gradient is not finite is skipped on all
    ranks, with or without this transform; a dynamic scale then backs off.

    Args:
        step: any step.
        scale: "dynamic", or a number for a static scale.
        initial, interval, minimum: of the dynamic scale; `interval` in updates.

    Example:
        >>> step = fz.loss_scale(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1)), 1024.0)
        >>> step.init({"w": torch.ones(1)}).extra["loss_scale"].scale
        1024.0
    """
    need_step(step, "loss_scale")
    need_number(initial, "loss_scale", "initial")
    need_number(minimum, "loss_scale", "minimum")
    need_int(interval, "loss_scale", "interval", "a number of updates")
    dynamic = isinstance(scale, str) and scale == "dynamic"
    if dynamic and not (initial >= minimum > 0 and interval >= 1):
        raise ValueError(
            f"loss_scale: got initial={initial}, minimum={minimum}, interval={interval}; expected "
            "initial >= minimum > 0 and interval >= 1."
        )
    if not dynamic and (isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < math.inf):
        raise ValueError(f"loss_scale: got scale={named(scale)}, expected 'dynamic' or a positive number.")

    first = ScaleState(initial if dynamic else float(scale))
    options = f", initial={initial}, interval={interval}, minimum={minimum}" if dynamic else ""
    return step.with_state(
        Extra(
            name="loss_scale",
            source=f"loss_scale({scale!r}{options})",
            init=functools.partial(_begun, first),
            update=functools.partial(_adjusted, interval, minimum) if dynamic else _kept,
            scale=operator.attrgetter("scale"),
            expendable=True,
            kind="a dynamic loss_scale" if dynamic else f"loss_scale({float(scale)})",
        )
    )


def _begun(first: ScaleState, params: object) -> ScaleState:
    return first


def _kept(state: ScaleState, params: object, applied: bool) -> ScaleState:
    return state


def _adjusted(interval: int, minimum: float, state: ScaleState, params: object, applied: bool) -> ScaleState:
    """Doubles after `interval` finite updates in a row, halves after one that is not, never below `minimum`."""
    if not applied:
        return ScaleState(max(minimum, state.scale / 2.0))
    if state.finite + 1 >= interval:
        return ScaleState(state.scale * 2.0)
    return ScaleState(state.scale, state.finite + 1)
