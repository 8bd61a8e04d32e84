"""How to write an optimizer: on whole leaves, or element by element.

An optimizer is optax's pair of pure functions. Under ZeRO each rank has slices of the leaves, so fzero gathers each
leaf for an update that needs the whole of it (`spectral`), and gathers nothing if the optimizer says that it treats
every element by itself (`signum`).

    python examples/my_optimizer.py --ranks 2
"""

from __future__ import annotations

import argparse
from typing import Any

import optree
import torch

import fzero as fz


def spectral(lr: float, decay: float = 0.9) -> fz.GradientTransformation:
    """Spectral descent (Carlson et al. 2015) with momentum: a matrix moves along `U @ V.T` of its momentum `U S V.T`.

    Both functions get one whole leaf at a time, as `{path: leaf}`.
    """

    def init(params: Any) -> Any:
        return {"count": 0, "momentum": {path: torch.zeros_like(p) for path, p in params.items()}}

    def direction(m: torch.Tensor) -> torch.Tensor:
        if m.ndim != 2:
            return m.sign()
        u, _, v = torch.linalg.svd(m, full_matrices=False)
        return u @ v

    def update(grads: Any, state: Any, params: Any) -> Any:
        momentum = {path: decay * state["momentum"][path] + g for path, g in grads.items()}
        rate = lr / (1 + state["count"]) ** 0.5
        updates = {path: -rate * direction(m) for path, m in momentum.items()}
        return updates, {"count": state["count"] + 1, "momentum": momentum}

    return fz.GradientTransformation(init, update)


def signum(lr: float, decay: float = 0.9) -> fz.GradientTransformation:
    """The sign of a momentum (Bernstein et al. 2018), declared elementwise.

    Both functions get this rank's flat piece of a leaf, as `{path: piece}`, and nothing is gathered.
    """

    def init(params: Any) -> Any:
        return optree.tree_map(torch.zeros_like, params)

    def update(grads: Any, momentum: Any, params: Any) -> Any:
        momentum = optree.tree_map(lambda m, g: decay * m + g, momentum, grads)
        return optree.tree_map(lambda m: -lr * m.sign(), momentum), momentum

    return fz.GradientTransformation(init, update, elementwise=True)


def loss_fn(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ params["w"]) @ params["out"] + params["b"] - y).square().mean()


def train(optimizer: fz.GradientTransformation, rank: int, ranks: int, steps: int) -> list[float]:
    """The losses of a small regression, under ZeRO-3 if there are several ranks."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    params = {"w": draw(8, 16) / 3, "out": draw(16, 4) / 4, "b": torch.zeros(4)}
    x, y = draw(64, 8), draw(64, 4)
    step = fz.train_step(loss_fn, fz.chain(fz.clip_by_global_norm(1.0), optimizer))
    step = fz.shard_zero3(step) if ranks > 1 else step
    state, losses = step.init(params), []
    for _ in range(steps):
        state, metrics = step(state, x.chunk(ranks)[rank], y.chunk(ranks)[rank])
        losses.append(float(metrics["loss"]))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="threads that each have a part of the state")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    for name, optimizer in {"spectral": spectral(0.1), "signum": signum(0.01)}.items():
        losses = fz.testing.run_ranks(lambda rank, own=optimizer: train(own, rank, args.ranks, args.steps), args.ranks)
        print(f"{name}: loss {losses[0][0]:.3f}, in step {args.steps} {losses[0][-1]:.3f}")


if __name__ == "__main__":
    main()
