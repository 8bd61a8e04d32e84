"""fz.plot_plan: who holds what of a plan, or the bytes a parameter of several; and axes for all pictures."""

from __future__ import annotations

import functools
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero.base.arguments import need_str, wrong
from fzero.base.patterns import PATTERN, matches
from fzero.planning.plan import Plan
from fzero.table.ranks import Held, Holdings, cuts_of
from fzero.table.rows import KINDS, Row

Axes = Any  # of matplotlib
LIMIT = 64  # ranks that are drawn
LINE = 16  # cells side by side, at most
STACKED = ("params", "moments", "grads")
HUES = ("#2f6db3", "#d9822b", "#3a9161", "#b5467c", "#7759b5", "#8c6d31", "#2b9c9c", "#c0504d")  # of a tensor axis
LINES = TEXT = "#7b7b7b"  # read alike on white and on black, as pictures have no background
ELSEWHERE = "#808080"
PALE, PALER = 0.35, 0.15  # opacity
PIXELS = 96  # of a side of a leaf


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
    return _draw_bars(_need_axes(axes, "barh"), sizes)


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
        return _draw_mesh(axes, plan.holdings, list(largest.values())[:3])
    if not (found := [row for row in plan.rows if matches(leaves, row.path)]):
        some = ", ".join(row.path for row in plan.rows[:6])
        raise ValueError(f"plot_plan: got leaves={leaves!r}, expected a pattern that matches some: {some}, ...")
    notes = [f"6 of {len(found)} leaves that match {leaves!r}"] if len(found) > 6 else []
    return _draw_mesh(axes, plan.holdings, found[:6], notes)


def new_axes(width: float, height: float) -> Axes:
    """Axes in a figure of their own, which no window shows by itself, and a notebook does: without pyplot."""
    from matplotlib.figure import Figure  # matplotlib is no dependency of fzero

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
    axes: Axes = figure.add_subplot(facecolor="none")
    axes._repr_png_ = functools.partial(_png, axes)
    return axes


def _png(axes: Axes) -> tuple[bytes, dict[str, int]]:
    """What IPython shows of the figure, and the size there, in pixels of 96 an inch."""
    file = io.BytesIO()
    axes.figure.savefig(file, format="png", dpi=192)
    width, height = axes.figure.get_size_inches()
    return file.getvalue(), {"width": round(96 * width), "height": round(96 * height)}


def add_frame(axes: Axes, unit: str, handles: Sequence[object]) -> None:
    """A horizontal axis in these units, no other sides, and a legend below it, whatever the height."""
    from matplotlib.transforms import ScaledTranslation

    axes.tick_params(axis="x", labelsize=8, color=LINES, labelcolor=TEXT)
    axes.tick_params(axis="y", labelsize=8, length=0, labelcolor=TEXT)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LINES)
    axes.set_xlabel(unit, fontsize=8, color=TEXT)
    below = axes.transAxes + ScaledTranslation(0, -0.42, axes.figure.dpi_scale_trans)
    look = {"ncols": 6, "frameon": False, "fontsize": 8, "labelcolor": TEXT}
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), bbox_transform=below, **look)


def _draw_bars(axes: Axes, sizes: Mapping[str, Sequence[float]]) -> Axes:
    """Draws a bar for each label, of bytes a parameter for each kind in `STACKED`."""
    axes = axes or new_axes(7, 1.0 + 0.3 * len(sizes))
    left, handles = [0.0] * len(sizes), list[object]()
    for kind, own in zip(STACKED, zip(*sizes.values(), strict=True), strict=True):
        handles.append(axes.barh(list(sizes), own, left=left, label=kind, color=HUES[len(handles)]))
        left = [start + size for start, size in zip(left, own, strict=True)]
    for place, size in enumerate(left):
        look = {"xytext": (3, 0), "textcoords": "offset points", "va": "center", "color": TEXT, "fontsize": 8}
        axes.annotate(f"{size:.1f}", (size, place), **look)
    axes.set_xlim(0, 1.12 * max(left))
    axes.invert_yaxis()
    add_frame(axes, "bytes per parameter, over all ranks", handles)
    return axes


@dataclass(frozen=True)
class View:
    """A leaf as a rectangle: the dim that is cut lies across, but for the first of several, which lies down."""

    shape: tuple[int, ...]  # of the leaf
    # rows, columns: its elements, row-major
    rows: int
    columns: int

    @staticmethod
    def of(shape: Sequence[int], dim: int | None) -> View:
        rows = math.prod(shape[: 1 if dim in (None, 0) and len(shape) > 1 else dim or 0])
        return View(tuple(shape), rows, math.prod(shape) // rows)

    @property
    def height(self) -> float:
        """The height of the rectangle for a width of 1, within limits."""
        return min(max(self.rows / self.columns, 0.2), 0.8)

    def pixels(self, held: Held, most: int = PIXELS) -> torch.Tensor:
        """A picture of what a rank holds, of at most so many pixels a side, each that of the element in its middle.

        Returns:
            [height, width] of 0 (on other ranks of the tensor axis), 1 (the rank's slice), 2 (its flat piece of that).
        """
        sides = [min(most, size) for size in (self.rows, self.columns)]
        down, across = [
            ((torch.arange(n, dtype=torch.float64, device="cpu") + 0.5) * size / n).long()
            for n, size in zip(sides, (self.rows, self.columns), strict=True)
        ]
        number = down[:, None] * self.columns + across  # of the element in the leaf
        if held.dim is None:
            return 1 + ((number >= held.start) & (number < held.stop)).long()
        inner = math.prod(self.shape[held.dim + 1 :])
        index, place = number // inner % self.shape[held.dim], torch.full_like(number, -1)
        for begin, (start, size) in zip(_begins(held), held.ranges, strict=True):
            place = torch.where((index >= start) & (index < start + size), begin + index - start, place)
        own = sum(size for _, size in held.ranges)
        number = (number // (inner * self.shape[held.dim]) * own + place) * inner + number % inner  # in the slice
        return (place >= 0) * (1 + ((number >= held.start) & (number < held.stop)).long())


def _begins(held: Held) -> list[int]:
    """Where each range of a slice begins in it."""
    return list(itertools.accumulate([size for _, size in held.ranges], initial=0))[:-1]


# ---- drawing


NUMBER, MARGIN = 0.24, 0.07  # of a cell: the line with its rank, and around the leaf
SIDE, HEAD, FOOT = 1.4, 1.1, 1.0  # of a panel: what lies beside, above and below its cells
WORDS = 5.0  # cells that a panel's words take at least
INCHES = 0.62  # of a cell


def _draw_mesh(axes: Axes, holdings: Holdings, rows: Sequence[Row], notes: Sequence[str] = ()) -> Axes:
    """Draws a panel for each leaf, in which each rank is a cell with its part of the leaf in it.

    The ranks of the last axis are side by side, and the first 64 of all are drawn.
    """
    ranks = holdings.ranks
    sizes = {axis: size for axis, size in ranks.sizes.items() if size > 1} or {next(iter(ranks.sizes), "rank"): 1}
    drawn, columns = min(LIMIT, ranks.count), min([*sizes.values()][-1], LINE)
    lines = -(-drawn // columns)
    views = [View.of(row.shape, row.slices and row.slices.dim) for row in rows]
    cells = [NUMBER + 2 * MARGIN + (1 - 2 * MARGIN) * view.height for view in views]
    width, height = SIDE + max(columns, WORDS), sum([HEAD + lines * cell + FOOT for cell in cells])
    axes, top = axes or new_axes(INCHES * (width + 0.3), INCHES * (height + 1.6)), 0.0
    for row, view, cell in zip(rows, views, cells, strict=True):
        top += HEAD
        what = "×".join(map(str, row.shape)) or "scalar"
        _text(axes, SIDE, top - 0.75, row.path, ha="left", weight="bold")
        _text(axes, SIDE, top - 0.35, f"{what}; {cuts_of(row, ranks)}", ha="left")
        for rank in range(drawn):
            line, column = divmod(rank, columns)
            _draw_cell(axes, SIDE + column, top + line * cell, holdings, row, rank, view)
            if column == 0 and len(sizes) > 1:
                place = [f"{axis} {ranks.coordinates(rank)[axis]}" for axis in [*sizes][:-1]]
                _text(axes, SIDE - 0.1, top + (line + 0.5) * cell, ", ".join(place), ha="right")
        top += lines * cell
        _text(axes, SIDE + columns / 2, top + 0.25, f"{[*sizes][-1]} →")
        top += FOOT
    title = f"{ranks.count} ranks: {ranks}" if ranks.sizes else "one rank"
    first = [f"the first {drawn} are drawn"] if drawn < ranks.count else []
    axes.set_title("; ".join([title, *first, *notes]), loc="left", fontsize=10, color=TEXT)
    axes.legend(
        handles=_legend(rows), loc="upper center", bbox_to_anchor=(0.5, 0.0), frameon=False, fontsize=8, labelcolor=TEXT
    )
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_aspect("equal")
    axes.set_axis_off()
    return axes


def _draw_cell(axes: Axes, x: float, y: float, holdings: Holdings, row: Row, rank: int, view: View) -> None:
    """Draws what a rank holds of a leaf, from this corner on."""
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle

    _text(axes, x + MARGIN, y + NUMBER / 2, str(rank), ha="left", size=6)
    held, ranks = holdings.of(row.path, rank), holdings.ranks
    hue = HUES[0 if held.dim is None else ranks.place(ranks.tensor, rank) % len(HUES)]
    colors = torch.tensor([to_rgba(ELSEWHERE, PALER), to_rgba(hue, PALE), to_rgba(hue)], device="cpu")
    left, right, top = x + MARGIN, x + 1 - MARGIN, y + NUMBER
    bottom = top + (1 - 2 * MARGIN) * view.height
    image = colors[view.pixels(held)].numpy()
    axes.imshow(image, extent=(left, right, bottom, top), interpolation="nearest")
    axes.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=LINES, linewidth=0.5))


def _text(axes: Axes, x: float, y: float, text: str, ha: str = "center", size: int = 8, **more: object) -> None:
    axes.text(x, y, text, ha=ha, va="center", color=TEXT, fontsize=size, **more)


def _legend(rows: Sequence[Row]) -> list[object]:
    """What the colours mean for these leaves."""
    from matplotlib.patches import Patch

    entries: dict[str, tuple[str, float]] = {}
    for row in rows:
        kept = {kind: getattr(row, kind) for kind in KINDS}
        own = [kind for kind, value in kept.items() if value is not None and (value.cuts or not row.cuts)]
        others = [kind for kind, value in kept.items() if value is not None and kind not in own]
        if own:
            entries[f"the rank keeps {_listed(own)} of it"] = HUES[0], 1.0
        if row.params.cuts:
            entries["gathered for each use"] = HUES[0], PALE
        if others:
            entries[f"the rank keeps {_listed(others)} of it"] = HUES[0], PALE
    if any(row.slices is not None for row in rows):
        entries["on other ranks of the tensor axis (each of its ranks has a colour)"] = ELSEWHERE, PALER
    return [Patch(facecolor=color, alpha=opacity, label=label) for label, (color, opacity) in entries.items()]


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
