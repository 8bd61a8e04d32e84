"""The picture of a training run: the loss of every update, and now and then that of held-out data."""

from __future__ import annotations

from pathlib import Path


def draw_losses(
    train: list[float],
    held_out: list[tuple[int, float]],
    baseline: tuple[str, float],
    path: Path,
    data: str,
    updates: str = "update",
    unit: str = "byte",
) -> None:
    """Draws losses in nats into a PNG file.

    Args:
        train: by update, from 1 on.
        held_out: (update, loss).
        baseline: what a dashed line is called, and its loss.
        data: what is held out.
        updates: label of the horizontal axis.
        unit: what a loss is a mean over.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(train) + 1), train, color="tab:blue", alpha=0.5, lw=1, label="train")
    axes.plot(*zip(*held_out, strict=True), color="tab:orange", marker="o", ms=3, label=data)
    axes.axhline(baseline[1], color="gray", ls="--", label=f"{baseline[0]}, {data}")
    axes.set(xlabel=updates, ylabel=f"loss, nats per {unit}")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
