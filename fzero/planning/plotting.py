"""Pictures of plans: bars of bytes a parameter, and a mesh with which rank holds what of some leaves."""

from __future__ import annotations

import functools
import io
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fzero.table.held import Held, Holdings, cuts_of
from fzero.table.rows import KINDS, Row

Axes = Any  # of matplotlib
LIMIT = 64  # ranks that are drawn
WIDE = 24  # cells side by side, at most where there is a choice
LINE = 16  # of a mesh of one axis
STACKED = ("params", "moments", "grads")
HUES = ("#2f6db3", "#d9822b", "#3a9161", "#b5467c", "#7759b5", "#8c6d31", "#2b9c9c", "#c0504d")  # of a tensor axis
LINES = TEXT = "#7b7b7b"  # read alike on white and on black, as pictures have no background
ELSEWHERE = "#808080"
PALE, PALER = 0.35, 0.15  # opacity


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


def draw_bars(axes: Axes, sizes: Mapping[str, Sequence[float]]) -> Axes:
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


# ---- where ranks and leaves are drawn


@dataclass(frozen=True)
class Grid:
    """The cells of the ranks that are drawn: those of the last axis side by side, and a line for each place on others.

    Attributes:
        sizes: axis -> its ranks. Axes of one rank are left out.
        shown: axis -> how many of its ranks are drawn, the first ones.
        columns: cells side by side; the ranks of a long axis that is alone go on in the next line.
    """

    sizes: Mapping[str, int]
    shown: Mapping[str, int]
    columns: int

    @staticmethod
    def of(mesh: Mapping[str, int]) -> Grid:
        sizes = {axis: size for axis, size in mesh.items() if size > 1} or {next(iter(mesh), "rank"): 1}
        shown, room = dict.fromkeys(sizes, 1), LIMIT
        for axis in reversed(sizes):
            shown[axis] = min(sizes[axis], room)
            room //= shown[axis]
        last = [*shown.values()][-1]
        return Grid(sizes, shown, min(last, LINE) if len(sizes) == 1 else last)

    @property
    def lines(self) -> int:
        return -(-math.prod(self.shown.values()) // self.columns)

    def cells(self) -> Iterator[tuple[int, int, int]]:
        """(rank, line, column) of every rank that is drawn."""
        for number, place in enumerate(itertools.product(*map(range, self.shown.values()))):
            rank = 0
            for index, size in zip(place, self.sizes.values(), strict=True):
                rank = rank * size + index
            yield rank, *divmod(number, self.columns)

    def label(self, line: int) -> str:
        """Where the ranks of a line are on all axes but the last."""
        words = list[str]()
        for axis, count in [*self.shown.items()][-2::-1]:
            line, place = divmod(line, count)
            words.insert(0, f"{axis} {place}")
        return ", ".join(words)


class Box(NamedTuple):
    """A part of a leaf, whose sides are 1: from the left, from the top."""

    left: float
    top: float
    width: float
    height: float


@dataclass(frozen=True)
class View:
    """A leaf as a rectangle: the dim that is cut lies across, but for the first of several, which lies down.

    Attributes:
        rows, columns: its elements, row-major.
        unit: rows, or columns, for one element of the dim that is cut.
    """

    rows: int
    columns: int
    down: bool
    unit: int

    @staticmethod
    def of(shape: Sequence[int], dim: int | None) -> View:
        down = dim in (None, 0) and len(shape) > 1
        rows = math.prod(shape[: 1 if down else dim or 0])
        columns = math.prod(shape) // rows
        return View(rows, columns, down, 1 if down else math.prod(shape[(dim or 0) + 1 :]))

    @property
    def height(self) -> float:
        """The height of the rectangle for a width of 1, within limits."""
        return min(max(self.rows / self.columns, 0.2), 0.8)

    def pieces(self, held: Held) -> list[tuple[int, int]]:
        """(start, size) of a rank's slice, in rows or columns of the leaf."""
        if held.dim is None:
            return [(0, self.rows if self.down else self.columns)]
        return [(start * self.unit, size * self.unit) for start, size in held.ranges if size]

    def slices(self, held: Held) -> list[Box]:
        """A rank's slice."""
        return [self._box(0, self._across, start, size) for start, size in self.pieces(held)]

    def own(self, held: Held) -> list[Box]:
        """The flat piece of a rank's slice: the end of a row, whole rows, the beginning of one."""
        width = self.columns if self.down else sum(size for _, size in self.pieces(held))
        start, boxes = held.start, list[Box]()
        while start < held.stop:
            row, left = divmod(start, width)
            whole = 0 if left else (held.stop - start) // width
            right = width if whole else min(width, left + held.stop - start)
            boxes += self._placed(held, row, row + max(whole, 1), left, right)
            start += max(whole, 1) * (right - left)
        return boxes

    @property
    def _across(self) -> int:
        return self.columns if self.down else self.rows

    def _placed(self, held: Held, top: int, bottom: int, left: int, right: int) -> Iterator[Box]:
        """A block of rows and columns of a slice, where they lie in the leaf."""
        begin, end = (top, bottom) if self.down else (left, right)
        other = (left, right - left) if self.down else (top, bottom - top)
        done = 0
        for start, size in self.pieces(held):
            low, high = max(begin, done), min(end, done + size)
            if low < high:
                yield self._box(*other, start + low - done, high - low)
            done += size

    def _box(self, other: int, extent: int, start: int, size: int) -> Box:
        """A box of `size` rows (or columns) from `start`, and of `extent` columns (or rows) from `other`."""
        if self.down:
            return Box(other / self.columns, start / self.rows, extent / self.columns, size / self.rows)
        return Box(start / self.columns, other / self.rows, size / self.columns, extent / self.rows)


# ---- drawing


NUMBER, MARGIN = 0.24, 0.07  # of a cell: the line with its rank, and around the leaf
SIDE, HEAD, FOOT = 1.4, 1.1, 1.0  # of a panel: what lies beside, above and below its cells
WORDS = 5.0  # cells that a panel's words take at least
INCHES = 0.62  # of a cell


def draw_mesh(axes: Axes, holdings: Holdings, rows: Sequence[Row], notes: Sequence[str] = ()) -> Axes:
    """Draws a panel for each leaf, in which each rank is a cell of the mesh, with its part of the leaf in it."""
    grid = Grid.of(holdings.ranks.sizes)
    panels = [(row, View.of(row.shape, row.slices and row.slices.dim)) for row in rows]
    width = SIDE + max(grid.columns, WORDS)
    across = max(1, min(len(rows), int(WIDE // width)))
    rest, height = panels, 0.0
    placed: list[tuple[float, float, float, Row, View]] = []
    while rest:
        own, rest = rest[:across], rest[across:]
        cell = NUMBER + 2 * MARGIN + (1 - 2 * MARGIN) * max(view.height for _, view in own)
        placed += [(place * width, height, cell, *pair) for place, pair in enumerate(own)]
        height += HEAD + grid.lines * cell + FOOT
    axes = axes or new_axes(INCHES * (across * width + 0.3), INCHES * (height + 1.6))
    for left, top, cell, row, view in placed:
        _Panel(axes, grid, left + SIDE, top + HEAD, cell).draw(holdings, row, view)
    drawn = math.prod(grid.shown.values())
    title = f"{holdings.ranks.count} ranks: {holdings.ranks}" if holdings.ranks.sizes else "one rank"
    first = [f"the first {drawn} are drawn"] if drawn < holdings.ranks.count else []
    axes.set_title("; ".join([title, *first, *notes]), loc="left", fontsize=10, color=TEXT)
    axes.legend(
        handles=_legend(rows), loc="upper center", bbox_to_anchor=(0.5, 0.0), frameon=False, fontsize=8, labelcolor=TEXT
    )
    axes.set_xlim(0, across * width)
    axes.set_ylim(height, 0)
    axes.set_aspect("equal")
    axes.set_axis_off()
    return axes


@dataclass(frozen=True)
class _Panel:
    """The cells of one leaf, from this corner on."""

    axes: Axes
    grid: Grid
    left: float
    top: float
    cell: float

    def draw(self, holdings: Holdings, row: Row, view: View) -> None:
        grid, what = self.grid, "×".join(map(str, row.shape)) or "scalar"
        self._text(self.left, self.top - 0.75, row.path, ha="left", weight="bold")
        self._text(self.left, self.top - 0.35, f"{what}; {cuts_of(row, holdings.ranks)}", ha="left")
        for rank, line, column in grid.cells():
            x, y = self.left + column, self.top + line * self.cell
            self._text(x + MARGIN, y + NUMBER / 2, str(rank), ha="left", size=6)
            held = holdings.of(row.path, rank)
            hue = HUES[0 if held.dim is None else holdings.ranks.place(holdings.ranks.tensor, rank) % len(HUES)]
            place = x + MARGIN, y + NUMBER, 1 - 2 * MARGIN
            self._fill(place, view, [Box(0, 0, 1, 1)], facecolor=ELSEWHERE, alpha=PALER)
            self._fill(place, view, view.slices(held), facecolor=hue, alpha=PALE)
            self._fill(place, view, [Box(0, 0, 1, 1)], fill=False, edgecolor=LINES, linewidth=0.5)
            # what is thinner than a line is still seen
            self._fill(place, view, view.own(held), facecolor=hue, edgecolor=hue, linewidth=0.8)
        for line in range(grid.lines if len(grid.sizes) > 1 else 0):
            self._text(self.left - 0.1, self.top + (line + 0.5) * self.cell, grid.label(line), ha="right")
        self._text(self.left + grid.columns / 2, self.top + grid.lines * self.cell + 0.25, f"{[*grid.sizes][-1]} →")

    def _text(self, x: float, y: float, text: str, ha: str = "center", color: str = TEXT, **more: object) -> None:
        size = more.pop("size", 8)
        self.axes.text(x, y, text, ha=ha, va="center", color=color, fontsize=size, **more)

    def _fill(self, place: tuple[float, float, float], view: View, boxes: Sequence[Box], **look: object) -> None:
        from matplotlib.patches import Rectangle

        x, y, width = place
        height = view.height * width
        for box in boxes:
            corner = x + box.left * width, y + box.top * height
            self.axes.add_patch(Rectangle(corner, box.width * width, box.height * height, **{"linewidth": 0, **look}))


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
