"""Loss scaling for float16 (Micikevicius et al. 2018): cotangents are scaled on the way in, grads carry the scale."""

from __future__ import annotations

from fzero.base.arguments import named, need_int, need_number
from fzero.table.needs import need_step
from fzero.table.scalers import DynamicLossScale, StaticLossScale
from fzero.table.spec import S


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
        >>> step.init({"w": torch.ones(1)}).loss_scale.scale
        1024.0
    """
    need_step(step, "loss_scale")
    need_number(initial, "loss_scale", "initial")
    need_number(minimum, "loss_scale", "minimum")
    need_int(interval, "loss_scale", "interval", "a number of updates")
    if isinstance(scale, str) and scale == "dynamic":
        if not (initial >= minimum > 0 and interval >= 1):
            raise ValueError(
                f"loss_scale: got initial={initial}, minimum={minimum}, interval={interval}; expected "
                "initial >= minimum > 0 and interval >= 1."
            )
        scaler: StaticLossScale | DynamicLossScale = DynamicLossScale(initial, interval, minimum=minimum)
    elif isinstance(scale, (int, float)) and not isinstance(scale, bool) and 0 < scale < float("inf"):
        scaler = StaticLossScale(float(scale))
    else:
        raise ValueError(f"loss_scale: got scale={named(scale)}, expected 'dynamic' or a positive number.")
    return step.with_header("scaler", scaler, f"loss_scale({scale!r})")
