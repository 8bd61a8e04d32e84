"""fz.plot_plan: who holds what of a plan, or the bytes a parameter of several."""

from __future__ import annotations

from collections.abc import Mapping

from fzero.base.arguments import need_str, wrong
from fzero.base.patterns import PATTERN, matches
from fzero.planning import plotting
from fzero.planning.plan import Plan
from fzero.planning.plotting import STACKED, Axes
from fzero.table.rows import Row


def plot_plan(plans: Plan | Mapping[str, Plan], axes: Axes = None, leaves: str | None = None) -> object:
    """Draws which rank holds which part of a leaf, or compares the bytes per parameter of several plans.

    - One plan: a cell for each rank of the mesh, up to 64. It shows the rank's slice of a leaf, and its flat piece of
      it.
    - Several plans: a bar for each, in bytes per parameter over all ranks. Activations and gathered params are not
      counted.

    Args:
        plans: what `fz.plan` returned, or label -> what it returned.
        axes: matplotlib axes to draw into. By default new ones.
        leaves: for one plan, a pattern of the leaves to draw (fnmatch over dotted paths), up to 6. By default the
            largest leaf of each way to cut, up to 3.

    Returns:
        The axes, which a notebook shows as a picture where they are new.

    Example:
        >>> step = fz.train_step(lambda p, x: (x @ p["w"]).sum(), fz.adamw(1e-3), fz.Policy.compact16())
        >>> plan = fz.plan(step, {"w": torch.empty(64, 64, device="meta")})
        >>> len(fz.plot_plan({"compact16": plan}).patches)
        3
        >>> step = fz.shard_zero3(fz.shard_tensor(step, {"w": 1}))
        >>> plan = fz.plan(step, {"w": torch.empty(64, 64, device="meta")}, mesh={"dp": 4, "tp": 2})
        >>> fz.plot_plan(plan).get_title(loc="left")
        '8 ranks: dp 4 × tp 2'
    """
    if isinstance(plans, Plan):
        if leaves is not None:
            need_str(leaves, "plot_plan", "leaves", PATTERN, or_none=True)
        return _who_holds_what(plans, _need_axes(axes, "add_patch"), leaves)
    if not isinstance(plans, Mapping) or not all(isinstance(plan, Plan) for plan in plans.values()):
        raise wrong("plot_plan", "plans", plans, "what fz.plan returned, or a dict of labels to that")
    if leaves is not None:
        raise wrong("plot_plan", "leaves", leaves, "None where several plans are drawn, as bars")
    if not plans:
        raise ValueError("plot_plan: got no plans; give at least one, {'label': fz.plan(step, params)}.")
    numels = {name: sum(row.numel for row in plan.rows) / plan.world_size for name, plan in plans.items()}
    sizes = {name: [getattr(plan, kind) / numels[name] for kind in STACKED] for name, plan in plans.items()}
    return plotting.draw_bars(_need_axes(axes, "barh"), sizes)


def _need_axes(axes: Axes, method: str) -> Axes:
    if axes is not None and not hasattr(axes, method):
        raise wrong("plot_plan", "axes", axes, "axes of matplotlib or None")
    return axes


def _who_holds_what(plan: Plan, axes: Axes, leaves: str | None) -> object:
    """The picture of a plan's mesh with some leaves."""
    if leaves is None:
        largest: dict[object, Row] = {}
        for row in sorted(plan.rows, key=lambda row: -row.numel):
            largest.setdefault((row.slices and row.slices.dim, bool(row.cuts), row.lifetime), row)
        return plotting.draw_mesh(axes, plan.holdings, list(largest.values())[:3])
    if not (found := [row for row in plan.rows if matches(leaves, row.path)]):
        some = ", ".join(row.path for row in plan.rows[:6])
        raise ValueError(f"plot_plan: got leaves={leaves!r}, expected a pattern that matches some: {some}, ...")
    notes = [f"6 of {len(found)} leaves that match {leaves!r}"] if len(found) > 6 else []
    return plotting.draw_mesh(axes, plan.holdings, found[:6], notes)
