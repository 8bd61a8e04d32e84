"""The drawings of the documentation, light and dark: `python docs/pictures.py` writes docs/_static/*.svg."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

OUT = pathlib.Path(__file__).parent / "_static"
COLORS = {"params": "#4c8dd6", "grads": "#e08a3c", "moments": "#5aa96a", "send": "#9a78c8", "compute": "#7a8899"}
INKS = {"light": "#1c2733", "dark": "#dfe6ee"}


def axes(width: float, height: float) -> Any:
    figure, own = plt.subplots(figsize=(width, height))
    figure.patch.set_alpha(0)
    own.axis("off")
    return own


def box(
    own: Any, x: float, y: float, width: float, height: float, color: str, text: str = "", ink: str = "white"
) -> None:
    own.add_patch(plt.Rectangle((x, y), width, height, facecolor=color, edgecolor="none", linewidth=0))
    if text:
        own.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=ink, fontsize=9)


def stages(ink: str) -> None:
    """What one of four ranks stores in each stage."""
    own = axes(7.4, 3.0)
    names = ["one process", "shard_zero1", "shard_zero2", "shard_zero3"]
    cut = [(), ("moments",), ("moments", "grads"), ("moments", "grads", "params")]
    for row, (name, parts) in enumerate(zip(names, cut, strict=True)):
        y, x = 3 - row, 0.0
        own.text(-0.15, y + 0.3, name, ha="right", va="center", color=ink, fontsize=10, family="monospace")
        for kind, size in (("params", 2.0), ("grads", 2.0), ("moments", 4.0)):
            width = size / 4 if kind in parts else size
            box(own, x, y, width, 0.6, COLORS[kind], kind if width > 1.5 else "")
            x += width + 0.06
        own.text(x + 0.1, y + 0.3, f"{[16, 10, 7, 4][row]} bytes a parameter", va="center", color=ink, fontsize=9)
    own.set_xlim(-2.0, 10.8)
    own.set_ylim(-0.1, 3.8)


def timeline(ink: str) -> None:
    """One step under ZeRO-3 in time: what is sent while what is computed."""
    own = axes(10.4, 2.7)
    lanes = [("network", 1.3), ("compute", 0.3)]
    for name, y in lanes:
        own.text(-0.2, y + 0.28, name, ha="right", va="center", color=ink, fontsize=10)
    for i in range(3):
        box(own, i * 1.5, 1.3, 1.3, 0.56, COLORS["params"], f"gather {i}")
        box(own, 1.4 + i * 1.5, 0.3, 1.4, 0.56, COLORS["compute"], f"forward {i}")
    for place, i in enumerate((2, 1, 0)):
        start = 5.95 + place * 2.9
        box(own, start, 0.3, 2.8, 0.56, COLORS["compute"], f"pullback {i}")
        if i:
            box(own, start + 1.4, 1.3, 1.3, 0.56, COLORS["params"], f"gather {i - 1}")
        box(own, start + 2.85, 1.3, 1.3, 0.56, COLORS["grads"], f"reduce {i}")
    box(own, 16.1, 0.3, 1.2, 0.56, COLORS["moments"], "update")
    own.annotate("", (17.4, -0.1), (0, -0.1), arrowprops={"arrowstyle": "->", "color": ink})
    own.text(17.4, -0.45, "time", ha="right", color=ink, fontsize=9)
    own.set_xlim(-1.9, 17.6)
    own.set_ylim(-0.6, 2.2)


def leaf(ink: str) -> None:
    """A leaf's way: natural tree, flat buffer, slices, full leaf in its unit."""
    own = axes(8.4, 2.6)
    leaves = [("q", 2.0, "#4c8dd6"), ("k", 2.0, "#3f77b8"), ("up", 3.0, "#6ba3e0")]
    y = 1.5
    for name, size, color in leaves:
        box(own, 0, y, size / 2, 0.42, color, name)
        y -= 0.55
    own.text(0.8, 2.15, "your leaves", ha="center", color=ink, fontsize=9)
    x = 3.0
    for name, size, color in leaves:
        box(own, x, 0.95, size / 2, 0.42, color, name)
        x += size / 2
    own.text(4.75, 2.15, "one flat buffer of the unit", ha="center", color=ink, fontsize=9)
    for rank in range(2):
        box(own, 8.0, 1.4 - rank * 0.9, 1.75, 0.42, COLORS["params"], f"rank {rank}")
    own.text(8.9, 2.15, "a slice on each rank", ha="center", color=ink, fontsize=9)
    box(own, 11.3, 0.95, 2.4, 0.42, COLORS["compute"], "full, for one call")
    own.text(12.5, 2.15, "all_gather in its unit", ha="center", color=ink, fontsize=9)
    for start, end in ((1.7, 2.8), (6.7, 7.8), (9.95, 11.1)):
        own.annotate("", (end, 1.16), (start, 1.16), arrowprops={"arrowstyle": "->", "color": ink})
    own.set_xlim(-0.2, 14.0)
    own.set_ylim(0.0, 2.5)


PICTURES: dict[str, Callable[[str], None]] = {"stages": stages, "timeline": timeline, "leaf": leaf}


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "fzero"
    for name, draw in PICTURES.items():
        for mode, ink in INKS.items():
            draw(ink)
            where = OUT / f"{name}-{mode}.svg"
            plt.savefig(where, transparent=True, bbox_inches="tight", pad_inches=0.05, metadata={"Date": None})
            plt.close()


if __name__ == "__main__":
    main()
