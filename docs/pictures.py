"""The drawings of the documentation: `python docs/pictures.py` writes docs/_static/*.svg, light and dark.

`python docs/pictures.py gallery` also writes docs/_static/gallery/*.svg; names instead of `gallery` write only those.
It runs parts of the examples, for about two minutes on two cores.
"""

from __future__ import annotations

import csv
import math
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import matplotlib
import torch

matplotlib.use("svg")
from matplotlib import pyplot as plt

import fzero as fz

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))
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


# ---- the gallery: one picture of each, whose ink reads on white and on black

INK, PALE = "#7b7b7b", "#80808033"
BLUE, ORANGE, GREEN, VIOLET, GREY = COLORS.values()


def plot(x: str, y: str) -> Any:
    """Axes for curves."""
    own = plt.figure(figsize=(2.6, 1.45), layout="constrained").add_subplot()
    own.spines[["top", "right"]].set_visible(False)
    own.spines[["left", "bottom"]].set_color(INK)
    own.tick_params(colors=INK, labelsize=7)
    own.set_xlabel(x, color=INK, fontsize=8)
    own.set_ylabel(y, color=INK, fontsize=8)
    return own


def sketch(width: float = 10.0, height: float = 5.0) -> Any:
    """Axes for boxes."""
    own = axes(2.6, 1.3)
    own.set_xlim(0, width)
    own.set_ylim(0, height)
    return own


def words(own: Any, x: float, y: float, text: str) -> None:
    own.text(x, y, text, ha="center", va="center", color=INK, fontsize=8)


def arrow(own: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    own.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": INK})


def train_lm() -> None:
    with tempfile.TemporaryDirectory() as folder:
        small = "--dtype fp32 --width 64 --blocks 2 --heads 2 --context 64 --batch 8 --steps 120".split()
        subprocess.run([sys.executable, str(EXAMPLES / "train_lm.py"), *small, "--out", folder], check=True)
        rows = list(csv.DictReader((pathlib.Path(folder) / "log.csv").open()))
    own = plot("update", "nats per byte")
    for name, color in (("loss", BLUE), ("held out", ORANGE)):
        found = [(int(row["step"]), float(row[name])) for row in rows if row[name]]
        own.plot(*zip(*found, strict=True), color=color, lw=1.5, label=name)
    own.legend(frameon=False, fontsize=7, labelcolor=INK)


def two_models(names: tuple[str, str], cuts: tuple[str, str], turned: bool) -> None:
    """An encoder and a decoder over two ranks each, the first cut by what it keeps, the other by its matrices."""
    own = sketch()
    for left, name, cut, color in ((0.2, names[0], cuts[0], BLUE), (6.2, names[1], cuts[1], GREEN)):
        words(own, left + 1.8, 4.6, name)
        for rank in range(2):
            x, y, width, height = (left + 1.85 * rank, 1.2, 1.7, 2.8) if turned else (left, 2.7 - 1.5 * rank, 3.6, 1.3)
            box(own, x, y, width, height, color, str(rank) if turned else f"rank {rank}")
        words(own, left + 1.8, 0.5, cut)
    arrow(own, (4.0, 3.0), (6.0, 3.0))
    arrow(own, (6.0, 2.2), (4.0, 2.2))


def read_text() -> None:
    two_models(("vision", "text"), ("shard_zero1", "shard_zero3"), False)


def multimodal() -> None:
    two_models(("patches", "matrices"), ("sequence axis", "tensor axis"), True)


def bigger_than_memory() -> None:
    from bigger_than_memory import options

    args = options([])
    own = plot("MiB", "")
    for place, (name, size, color) in enumerate(
        (("memory", args.limit, BLUE), ("state on disk", args.limit * args.times, VIOLET))
    ):
        own.barh(name, size, color=color, height=0.6)
        look = {"xytext": (3, 0), "textcoords": "offset points", "va": "center", "color": INK, "fontsize": 7}
        own.annotate(f"{size:,.0f}", (size, place), **look)
    own.set_xlim(0, 1.25 * args.limit * args.times)
    own.invert_yaxis()


def long_context() -> None:
    own = sketch()
    for rank in range(2):
        left = 0.2 + 4.9 * rank
        words(own, left + 2.3, 4.5, f"rank {rank}")
        for line in range(4):
            box(own, left, 3.1 - 0.95 * line, 4.6, 0.7, PALE)
    for x, line, text in ((1.1, 0, "Q7"), (3.2, 2, "B2"), (5.9, 1, "K4"), (7.9, 3, "Q?")):
        box(own, x, 3.1 - 0.95 * line, 1.1, 0.7, ORANGE if "?" in text else BLUE, text)


def lora() -> None:
    own = sketch()
    box(own, 0.6, 0.9, 3.6, 3.6, PALE)
    words(own, 2.4, 2.7, "frozen, bf16")
    words(own, 4.9, 2.7, "+")
    box(own, 5.6, 0.9, 0.7, 3.6, BLUE, "b")
    box(own, 6.6, 3.8, 3.0, 0.7, BLUE, "a")
    words(own, 8.1, 2.3, "trained, fp32")


def maml() -> None:
    import maml as example

    args = example.options(["--ranks", "1", "--stage", "0"])
    own, generator = plot("update", "query loss"), torch.Generator().manual_seed(0)
    one = example.Maml(example.regressor(args.width, generator), args)
    held_out, state = example.random_tasks(50, args.shots, generator, torch.device("cpu")), one.outer.init(one.params)
    looks = list[tuple[float, ...]]()
    for _ in range(args.steps):
        looks.append(tuple(float(one.meta_loss(state.params, held_out, steps)) for steps in (0, args.inner_steps)))
        state, _ = one.update(state, example.random_tasks(args.tasks, args.shots, generator, torch.device("cpu")))
    for name, color, losses in zip(("before", "after 5 steps"), (GREY, BLUE), zip(*looks, strict=True), strict=True):
        own.plot(losses, color=color, lw=1.5, label=name)
    own.legend(frameon=False, fontsize=7, labelcolor=INK)


def generate() -> None:
    own = sketch()
    for row, y in enumerate((3.1, 1.0)):
        words(own, 1.5, y + 1.35, f"rank {row}")
        for unit in range(4):
            box(own, 0.3 + 0.62 * unit, y, 0.5, 0.9, BLUE if unit == 1 else PALE)
    arrow(own, (3.0, 2.5), (4.3, 2.5))
    box(own, 4.5, 1.6, 0.9, 1.8, BLUE)
    arrow(own, (5.6, 2.5), (6.9, 2.5))
    words(own, 8.4, 4.4, "engine")
    for unit in range(4):
        box(own, 7.1 + 0.68 * unit, 1.6, 0.56, 1.8, GREEN if unit < 1 else PALE)


def ensemble() -> None:
    import ensemble as example

    own, generator = plot("update", "held-out loss"), torch.Generator().manual_seed(0)
    held_out, lrs = example.spirals(500, 0.02, generator), torch.logspace(-3.5, -1, 16, dtype=torch.float64)
    state = fz.stack([example.step_of(0.0).init(example.random_params(16, seed % 2)) for seed in range(16)])
    curves = []
    for update in range(241):
        if update % 10 == 0:
            curves.append(torch.vmap(example.look, in_dims=(0, 0, None, None))(lrs, state, *held_out))
        batch = example.spirals(64, 0.02, generator)
        state, _ = torch.vmap(example.update, in_dims=(0, 0, None, None))(lrs, state, *batch)
    colors = plt.get_cmap("cool")(torch.linspace(0, 1, 16).numpy())
    for color, curve in zip(colors, torch.stack(curves, 1).tolist(), strict=True):
        own.plot(range(0, 241, 10), curve, color=color, lw=1)


def my_transform() -> None:
    from my_transform import ema

    own, generator = plot("update", "a weight"), torch.Generator().manual_seed(0)
    step = ema(fz.train_step(lambda p, x: (p["w"] - x).square().mean(), fz.sgd(0.25)), decay=0.9)
    state, seen = step.init({"w": torch.zeros(())}), []
    for _ in range(60):
        state, _ = step(state, 1 + torch.randn((), generator=generator))
        seen.append((float(state.params["w"]), float(state.extra["ema"]["w"])))
    for name, color, values in zip(("params", "average"), (GREY, BLUE), zip(*seen, strict=True), strict=True):
        own.plot(values, color=color, lw=1.5 if color == BLUE else 0.8, label=name)
    own.legend(frameon=False, fontsize=7, labelcolor=INK)


def my_optimizer() -> None:
    import my_optimizer as example

    own = plot("update", "loss")
    made = {"spectral": example.spectral(0.1), "signum": example.signum(0.01)}
    for color, (name, optimizer) in zip((BLUE, ORANGE), made.items(), strict=True):
        own.plot(example.train(optimizer, 0, 1, 60), color=color, lw=1.5, label=name)
    own.legend(frameon=False, fontsize=7, labelcolor=INK)


def bytes_per_parameter() -> None:
    like = {"w": torch.empty(1024, 1024, device="meta")}
    policies = {"fp32": fz.Policy(), "exact": fz.Policy.exact(), "compact16": fz.Policy.compact16()}
    step = fz.train_step(lambda p: p, fz.adamw(1e-3))
    plans = {name: fz.plan(fz.train_step(step.fn, step.optimizer, policy), like) for name, policy in policies.items()}
    own = plot("", "")
    fz.plot_plan(plans, own)


def mesh_axes() -> None:
    own = sketch()
    for left, name, down in ((0.6, "by columns", False), (5.6, "by rows", True)):
        for part, color in enumerate((BLUE, ORANGE, GREEN)):
            place = (left, 3.3 - 1.2 * part, 3.6, 1.15) if down else (left + 1.2 * part, 0.9, 1.15, 3.55)
            box(own, *place, color, f"rank {part}" if down else str(part))
        words(own, left + 1.8, 0.4, name)


def components() -> None:
    own = plot("", "")
    fz.plot_schedule({"one_f_one_b": fz.schedules.one_f_one_b(3, 5)}, axes=own)
    own.get_legend().remove()
    own.texts[0].remove()  # the heading
    own.set_yticklabels([f"place {place}" for place in range(3)])
    own.set_xlabel("time")


def step_is_a_function() -> None:
    w, x = torch.tensor([1.0, -2.0]), torch.tensor([[1.0, 0.2], [0.3, 2.0]])

    def after_training(lr: torch.Tensor) -> torch.Tensor:
        step = fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), fz.sgd(lr, momentum=0.8))
        state = step.init({"w": w})
        for _ in range(12):
            state, _ = step(state, x)
        return step.forward(state, x)

    rates, own = torch.logspace(-2.5, -0.1, 80), plot("learning rate", "loss after 12 updates")
    own.loglog(rates, torch.vmap(after_training)(rates), color=GREY, lw=1.2)
    at = torch.tensor(math.log(5e-3))
    path = list[tuple[float, float]]()
    for _ in range(8):
        slope, loss = torch.func.grad_and_value(lambda log: after_training(log.exp()).log())(at)
        path.append((float(at.exp()), float(loss.exp())))
        at = at - (0.3 * slope).clamp(-0.6, 0.6)
    own.plot(*zip(*path, strict=True), "o-", color=ORANGE, ms=3, lw=1)


GALLERY: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        *(train_lm, read_text, multimodal, bigger_than_memory, long_context, lora, maml, generate, ensemble),
        *(my_transform, my_optimizer, bytes_per_parameter, components, step_is_a_function),
    )
} | {"axes": mesh_axes}


def save(where: pathlib.Path) -> None:
    where.parent.mkdir(exist_ok=True)
    plt.savefig(where, transparent=True, bbox_inches="tight", pad_inches=0.05, metadata={"Date": None})
    plt.close()


def main() -> None:
    plt.rcParams |= {
        "svg.hashsalt": "fzero",
        "svg.fonttype": "none",
        "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
    }
    for name, draw in PICTURES.items():
        for mode, ink in INKS.items():
            draw(ink)
            save(OUT / f"{name}-{mode}.svg")
    asked = GALLERY if "gallery" in sys.argv else [name for name in GALLERY if name in sys.argv]
    for name in asked:
        GALLERY[name]()
        save(OUT / "gallery" / f"{name}.svg")


if __name__ == "__main__":
    main()
