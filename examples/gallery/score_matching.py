"""Sliced score matching (arXiv 1905.07088) of an energy, whose loss holds second derivatives, under ZeRO-3.

The gradient of such a loss by the params is a third derivative. soran-ghaderi/torchebm#244 reports that FSDP2 frees the
params that the graph of the score still needs, and goes around its hooks by `functional_call` on DTensors. Here
`torch.func` goes through the network as through any function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from common import compare, mlp, normal
from torch import Tensor

import fzero as fz

STEPS, EXAMPLES, DIMS = 5, 12, 3


def batch(update: int) -> tuple[Tensor, Tensor]:
    """Data, and a direction for each example."""
    return normal(2 * update, EXAMPLES, DIMS).tanh(), normal(2 * update + 1, EXAMPLES, DIMS)


def loss(energy: Callable[[Tensor], Tensor], x: Tensor, direction: Tensor) -> Tensor:
    def score(x: Tensor) -> Tensor:
        return -torch.func.grad(lambda x: energy(x).sum())(x)

    value, along = torch.func.jvp(score, (x,), (direction,))  # type: ignore[misc]
    return ((direction * along).sum(1) + value.square().sum(1) / 2).mean()


def main(rank: int, ranks: int) -> Mapping[str, Tensor]:
    apply, params = fz.functional(mlp(0, DIMS, 16, 16, 1))
    fn = lambda params, *batch: loss(functools.partial(apply, params), *batch)
    step = fz.freeze(fz.shard_zero3(fz.train_step(fn, fz.adamw(1e-2))), "4.bias")  # which no score depends on
    state = step.init(params)
    for update in range(STEPS):
        state, _ = step(state, *[x.chunk(ranks)[rank] for x in batch(update)])
    return fz.gather(state.params)


def plain() -> Mapping[str, Tensor]:
    network = mlp(0, DIMS, 16, 16, 1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for update in range(STEPS):
        optimizer.zero_grad()
        loss(network, *batch(update)).backward()
        optimizer.step()
    return {name: param.detach() for name, param in network.named_parameters()}


if __name__ == "__main__":
    compare(main, plain)
