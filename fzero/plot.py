"""fz.plot_plan: where the bytes of a parameter go, one bar per plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fzero.base.arguments import wrong
from fzero.plan import Plan

KINDS = ("params", "moments", "grads")


def plot_plan(plans: Mapping[str, Plan], axes: Any = None) -> object:
    """Draws the bytes a parameter of each plan, over all ranks, stacked by kind of state.

    Grads are those that live at most at once, reduced; gathered params and activations are not counted.

    Args:
        plans: label -> what `fz.plan` returned.
        axes: of matplotlib, to draw into; new ones by default.

    Returns:
        The axes.

    Example:
        >>> step = fz.train_step(lambda p: p, fz.adamw(1e-3), fz.Policy.compact16())
        >>> plan = fz.plan(step, {"w": torch.empty(64, 64, device="meta")})
        >>> len(fz.plot_plan({"compact16": plan}).patches)
        3
    """
    if not isinstance(plans, Mapping) or not all(isinstance(plan, Plan) for plan in plans.values()):
        raise wrong("plot_plan", "plans", plans, "a dict of labels to what fz.plan returned")
    if not plans:
        raise ValueError("plot_plan: got no plans; give at least one, {'label': fz.plan(step, params)}.")
    if axes is not None and not hasattr(axes, "barh"):
        raise wrong("plot_plan", "axes", axes, "axes of matplotlib or None")
    if axes is None:
        from matplotlib.figure import Figure  # matplotlib is no dependency of fzero

        axes = Figure(figsize=(7, 0.8 + 0.4 * len(plans)), layout="constrained").add_subplot()
    left = [0.0] * len(plans)
    for kind in KINDS:
        sizes = [getattr(plan, kind) * plan.world_size / sum(row.numel for row in plan.rows) for plan in plans.values()]
        axes.barh(list(plans), sizes, left=left, label=kind)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for place, size in enumerate(left):
        axes.text(size, place, f" {size:.1f}", va="center")
    axes.set_xlim(0, 1.12 * max(left))
    axes.invert_yaxis()
    axes.set_xlabel("bytes a parameter, over all ranks")
    axes.legend(loc="lower right")
    return axes
