"""Trains 16 small models at once, over a grid of learning rates and seeds: `torch.vmap` over steps.

A step is a function, so that it can be mapped over states that are stacked, and over the learning rate that its
optimizer is made with. Then each model is trained alone, which takes longer and gives the same. About half a minute on
two cores:

    python examples/ensemble.py
    python examples/ensemble.py --no-jit
    python examples/ensemble.py --rates 32 --seeds 1 --steps 1000

The models tell the arms of two spirals from each other, in float64. At the end there is a picture of the losses.
"""

from __future__ import annotations

import argparse
import itertools
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from launch import add_numbers, parser_of
from torch import Tensor
from tqdm import tqdm

import fzero as fz

Batch = tuple[Tensor, Tensor]  # points [b, 2] and the arms that they lie on [b]
TURNS = 1.5  # of an arm


def spirals(count: int, noise: float, generator: torch.Generator) -> Batch:
    along = torch.rand(count, generator=generator, dtype=torch.float64)
    arm = torch.randint(2, (count,), generator=generator)
    angle = 2 * math.pi * TURNS * along + math.pi * arm
    x = (0.1 + along).unsqueeze(1) * torch.stack([angle.cos(), angle.sin()], 1)
    return x + noise * torch.randn(x.shape, generator=generator, dtype=x.dtype), arm


# ---- a model, and a step of it


def random_params(width: int, seed: int) -> list[dict[str, Tensor]]:
    generator, sizes = torch.Generator().manual_seed(seed), (2, width, width, 2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return [{"w": normal(m, n) / m**0.5, "b": normal(n)} for m, n in itertools.pairwise(sizes)]


def loss_fn(params: Any, x: Tensor, arm: Tensor) -> Tensor:
    *hidden, last = params
    for p in hidden:
        x = torch.tanh(x @ p["w"] + p["b"])
    return F.cross_entropy(x @ last["w"] + last["b"], arm)


def step_of(lr: float | Tensor) -> fz.Step:
    return fz.train_step(loss_fn, fz.adamw(lr))


# ---- all at once, and one by one


def update(lr: Tensor, state: fz.TrainState, *batch: Tensor) -> tuple[fz.TrainState, Tensor]:
    """What is mapped: of one member an update at its own learning rate, which is why the step is made here."""
    state, metrics = step_of(lr)(state, *batch)
    return state, metrics["loss"]


def look(lr: Tensor, state: fz.TrainState, *batch: Tensor) -> Tensor:
    return step_of(lr).forward(state, *batch)


def main(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)  # which is quickest for operations as small as these
    generator = torch.Generator().manual_seed(args.seed)
    held_out = spirals(1000, args.noise, generator)
    batches = [spirals(args.batch, args.noise, generator) for _ in range(args.steps)]  # the same for all members
    grid = torch.logspace(math.log10(args.lowest), math.log10(args.highest), args.rates, dtype=torch.float64)
    lrs, count = grid.repeat_interleave(args.seeds), args.rates * args.seeds
    starts = [step_of(0.0).init(random_params(args.width, args.seed + i % args.seeds)) for i in range(count)]

    update_all = torch.vmap(update, in_dims=(0, 0, None, None))
    update_all = fz.jit(update_all) if args.jit else update_all
    look_at_all = torch.vmap(look, in_dims=(0, 0, None, None))
    stacked = fz.stack(starts)
    update_all(lrs, stacked, *batches[0])  # what torch does once, it has done; and a graph is compiled
    step_of(0.0)(starts[0], *batches[0])

    interval = 0.5 if sys.stderr.isatty() else 10
    state, losses, together = stacked, [], 0.0
    curve = [look_at_all(lrs, state, *held_out)]
    for done, batch in enumerate(tqdm(batches, desc="all at once", unit="update", mininterval=interval), 1):
        began = time.perf_counter()
        state, loss = update_all(lrs, state, *batch)
        together += time.perf_counter() - began
        losses.append(loss)
        if done % args.eval_every == 0 or done == args.steps:
            curve.append(look_at_all(lrs, state, *held_out))

    alone, apart, apart_losses = 0.0, [], []
    of_members = torch.stack(losses, 1)  # [members, updates]
    pairs = list(zip(lrs.tolist(), starts, fz.unstack(state), of_members, strict=True))
    for lr, single, member, own in tqdm(pairs, desc="one by one", unit="model", mininterval=interval):
        step, losses = step_of(lr), []
        began = time.perf_counter()
        for batch in batches:
            single, metrics = step(single, *batch)
            losses.append(metrics["loss"])
        alone += time.perf_counter() - began
        apart.append(max((single.params[path] - x).abs().max().item() for path, x in member.params.items()))
        apart_losses.append((torch.stack(losses) - own).abs().max().item())

    print(f"\n{'learning rate':>13} {'seed':>5} {'held-out loss':>14} {'params apart':>13} {'losses apart':>13}")
    rows = zip(lrs.tolist(), curve[-1].tolist(), apart, apart_losses, strict=True)
    for i, (lr, loss, of_params, of_losses) in enumerate(rows):
        print(f"{lr:>13.1e} {args.seed + i % args.seeds:>5} {loss:>14.4f} {of_params:>13.1e} {of_losses:>13.1e}")
    print("\nlargest difference between a member and its single run, where a large learning rate multiplies what")
    print(f"rounding begins: params {max(apart):.1e}, losses {max(apart_losses):.1e}")
    print(f"{count} models at once {together:.2f} s, one by one {alone:.2f} s: {together / alone:.2f} of it")
    args.out.mkdir(parents=True, exist_ok=True)
    at = sorted({*range(0, args.steps, args.eval_every), args.steps})
    draw(at, torch.stack(curve, 1).view(args.rates, args.seeds, -1), grid, args.out / "losses.png")
    print(f"saved {args.out / 'losses.png'}")
    return 0


def draw(at: list[int], curves: Tensor, grid: Tensor, path: Path) -> None:
    """Held-out losses over updates, and the last ones over learning rates.

    Args:
        curves: [learning rates, seeds, looks].
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    colors = plt.get_cmap("viridis")(torch.linspace(0, 0.95, len(grid)).numpy())
    for lr, color, of_seeds in zip(grid.tolist(), colors, curves, strict=True):
        for i, curve in enumerate(of_seeds.tolist()):
            left.plot(at, curve, color=color, lw=1, label=f"{lr:.0e}" if i == 0 else None)
            right.plot(lr, curve[-1], "o", color=color, ms=5)
    left.set(xlabel="update", ylabel="held-out loss, nats", yscale="log")
    right.set(xlabel="learning rate", xscale="log")
    left.legend(frameon=False, fontsize=8, ncols=2, title="learning rate")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


# ---- options


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_numbers(
        parser,
        ("rates", 8, "learning rates of the grid"),
        ("seeds", 2, "models of each learning rate, which begin with other params"),
        ("lowest", 3e-4, "lowest learning rate"),
        ("highest", 4e-2, "highest learning rate"),
        ("width", 32, "features of the two hidden layers"),
        ("batch", 64, "points of an update"),
        ("noise", 0.03, "standard deviation of a point around its arm"),
        ("steps", 300, "updates of each model"),
        ("eval-every", 20, "updates between two looks at the held-out points"),
    )
    parser.add_argument(
        "--jit",
        action=argparse.BooleanOptionalAction,
        default=shutil.which("g++") is not None,
        help="run all updates as one compiled graph; by default if there is a compiler",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the data and of the first model of a learning rate")
    parser.add_argument("--out", type=Path, default=Path("out/ensemble"), help="folder for the picture")
    args = parser.parse_args(argv)
    if args.seed < 0:
        parser.error("--seed must not be negative")
    return args


if __name__ == "__main__":
    sys.exit(main(options()))
