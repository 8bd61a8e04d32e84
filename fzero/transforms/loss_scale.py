"""Loss scaling for float16 (Micikevicius et al. 2018): cotangents are scaled on the way in, grads carry the scale."""

from __future__ import annotations

import functools
import math
import operator
from typing import NamedTuple

from fzero.base.arguments import named, need_bool, need_int, need_number, renamed
from fzero.table.spec import Extra, S, need_step


class ScaleState(NamedTuple):
    """The loss scale.

    Attributes:
        finite: how many updates in a row were finite since it last changed.
        tolerated: how many were not since it last grew, and left it as it was.
    """

    scale: float
    finite: int = 0
    tolerated: int = 0


@renamed(init_scale="initial", growth_interval="interval")
def loss_scale(
    step: S,
    scale: float | str = "dynamic",
    *,
    initial: float = 2.0**16,
    interval: int = 2000,
    minimum: float = 1.0,
    hysteresis: int = 1,
    consecutive: bool = False,
    late: bool = False,
) -> S:
    """Scales the loss for float16: every cotangent is multiplied by a scale inside the pullback.

    Grads carry the scale. `step.update`, `fz.gather` and `fz.global_norm` take it off. Outputs, metrics and input
    cotangents are not scaled. An update whose gradient is not finite is skipped on all ranks (with or without this
    transform), and a dynamic scale then halves.

    The scale is in `state.extra["loss_scale"]` and in `metrics["loss_scale"]`.

    Args:
        step: any step.
        scale: `"dynamic"`, or a positive number for a static scale.
        initial: the dynamic scale at first. `init_scale`, torch's name, works too.
        interval: the dynamic scale doubles after so many finite updates in a row. `growth_interval` works too.
        minimum: the dynamic scale never falls below this.
        hysteresis: the dynamic scale halves from the `hysteresis`-th update on that is not finite. Earlier ones are
            only skipped. They need not come in a row: the count begins again once the scale has grown. DeepSpeed's
            default is 2.
        consecutive: count only those in a row: the count begins again after an update that is finite. DeepSpeed's
            `consecutive_hysteresis`.
        late: the first growth, at the start and behind an update that is not finite, takes one finite update more, as
            in DeepSpeed.

    Returns:
        A new step.

    Raises:
        TypeError: an argument is no number.
        ValueError: a number is out of its range: `initial >= minimum > 0`, `interval >= 1`, `hysteresis >= 1`.

    Source:
        Micikevicius et al. 2018, arXiv 1710.03740.

    Example:
        >>> step = fz.loss_scale(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1)), 1024.0)
        >>> step.init({"w": torch.ones(1)}).extra["loss_scale"].scale
        1024.0
    """
    need_step(step, "loss_scale")
    need_number(initial, "loss_scale", "initial")
    need_number(minimum, "loss_scale", "minimum")
    need_int(interval, "loss_scale", "interval", "a number of updates")
    need_int(hysteresis, "loss_scale", "hysteresis", "a number of updates", 1)
    need_bool(consecutive, "loss_scale", "consecutive")
    need_bool(late, "loss_scale", "late")
    dynamic = isinstance(scale, str) and scale == "dynamic"
    if dynamic and not (initial >= minimum > 0 and interval >= 1):
        raise ValueError(
            f"loss_scale: got initial={initial}, minimum={minimum}, interval={interval}; expected "
            "initial >= minimum > 0 and interval >= 1."
        )
    if not dynamic and (isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < math.inf):
        raise ValueError(f"loss_scale: got scale={named(scale)}, expected 'dynamic' or a positive number.")

    begin = -1 if dynamic and late else 0
    first = ScaleState(initial if dynamic else float(scale), begin)
    counts = interval, minimum, hysteresis, consecutive, begin
    options = f", initial={initial}, interval={interval}, minimum={minimum}" if dynamic else ""
    options += f", hysteresis={hysteresis}" if dynamic and hysteresis > 1 else ""
    options += ", consecutive=True" if dynamic and consecutive else ""
    options += ", late=True" if dynamic and late else ""
    return step.with_state(
        Extra(
            name="loss_scale",
            source=f"loss_scale({scale!r}{options})",
            init=functools.partial(_begun, first),
            update=functools.partial(_adjusted, *counts) if dynamic else None,
            scale=operator.attrgetter("scale"),
            expendable=True,
            kind="a dynamic loss_scale" if dynamic else f"loss_scale({float(scale)})",
        )
    )


def _begun(first: ScaleState, params: object) -> ScaleState:
    return first


def _adjusted(
    interval: int, minimum: float, hysteresis: int, consecutive: bool, begin: int,
    state: ScaleState, params: object, applied: bool,
) -> ScaleState:  # fmt: skip
    """Doubles after `interval` finite updates in a row, halves after one that is not and no more tolerated."""
    scale, finite, tolerated = state
    if not applied and tolerated + 1 < hysteresis:
        return ScaleState(scale, begin, tolerated + 1)
    if not applied:
        return ScaleState(max(minimum, scale / 2.0), begin, tolerated)
    if finite + 1 >= interval:
        return ScaleState(scale * 2.0)
    return ScaleState(scale, finite + 1, 0 if consecutive else tolerated)
