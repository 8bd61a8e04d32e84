"""MAML (arXiv 1703.03400) with a learned rate (arXiv 1707.09835): derivatives through updates, under ZeRO-3.

The loss after two inner steps is differentiated by the params before the first, and by the rate of both. In
pytorch/pytorch#63929 users ask for that under DDP, whose averages no graph records; through torch's optimizers FSDP2
gives the first-order part alone, without a word. Here a step is a function, and `torch.func.grad` goes through it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from common import compare, mlp, normal
from torch import Tensor

import fzero as fz

SIZES, UPDATES, INNER, EXAMPLES = (3, 16, 2), 3, 2, 12


def task(update: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs and targets to adapt to, and others to be judged by."""
    x, held_x = normal(3 * update, 2, EXAMPLES, 3)
    mixed = normal(3 * update + 1, 3, 2)
    return x, (x @ mixed).sin(), held_x, (held_x @ mixed).sin()


def main(rank: int, ranks: int) -> Mapping[str, Tensor]:
    apply, params = fz.functional(mlp(0, *SIZES))
    fn = lambda params, x, y: F.mse_loss(apply(params, x), y)

    def judged(learned: Mapping[str, Tensor], x: Tensor, y: Tensor, *held: Tensor) -> Tensor:
        weights = dict(learned)
        step = fz.shard_zero3(fz.train_step(fn, fz.sgd(weights.pop("rate"))))
        state = step.init(weights)
        for _ in range(INNER):
            state, _ = step(state, x, y)
        return step.forward(state, *held)

    outer = fz.shard_zero3(fz.train_step(judged, fz.adamw(1e-2)))
    state = outer.init({**params, "rate": torch.tensor(0.1, dtype=torch.float64)})
    for update in range(UPDATES):
        own = [x.chunk(ranks)[rank] for x in task(update)]
        # of the mean over ranks, and whole on each of them; examples/maml.py takes derivatives by slices
        grads = torch.func.grad(judged)(fz.gather(state.params), *own)
        state, _ = outer.update(state, grads)
    return fz.gather(state.params)


def plain() -> Mapping[str, Tensor]:
    network = mlp(0, *SIZES)
    learned = dict(network.named_parameters()) | {"rate": torch.tensor(0.1, dtype=torch.float64, requires_grad=True)}
    optimizer = torch.optim.AdamW(learned.values(), lr=1e-2)
    for update in range(UPDATES):
        x, y, held_x, held_y = task(update)
        weights = {name: leaf for name, leaf in learned.items() if name != "rate"}
        call = functools.partial(torch.func.functional_call, network)
        for _ in range(INNER):
            grads = torch.autograd.grad(F.mse_loss(call(weights, x), y), list(weights.values()), create_graph=True)
            weights = {name: w - learned["rate"] * g for (name, w), g in zip(weights.items(), grads, strict=True)}
        optimizer.zero_grad()
        F.mse_loss(call(weights, held_x), held_y).backward()
        optimizer.step()
    return {name: leaf.detach() for name, leaf in learned.items()}


if __name__ == "__main__":
    compare(main, plain)
