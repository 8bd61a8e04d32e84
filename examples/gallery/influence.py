"""Which examples raise the held-out loss? Its derivative by a weight of each, through a whole run under ZeRO-3.

EleutherAI/bergson#155 does so by a trainer of its own, which goes back through checkpoints of every step. Here the run
is a function of the weights, and `fz.scan` keeps a few of its states and computes the others again.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from common import compare, mlp, normal
from torch import Tensor

import fzero as fz

SIZES, UPDATES, EXAMPLES, BATCH, RATE, MOMENTUM = (3, 16, 2), 9, 24, 8, 0.1, 0.9


def rows(update: int) -> Tensor:
    """The numbers of the examples in a batch."""
    return torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(update))[:BATCH]


def held_out() -> tuple[Tensor, Tensor]:
    return normal(3, BATCH, 3), normal(4, BATCH, 2)


def errors(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean(1)


def main(rank: int, ranks: int) -> Mapping[str, Tensor]:
    apply, params = fz.functional(mlp(0, *SIZES))
    x, y = normal(1, EXAMPLES, 3), normal(2, EXAMPLES, 2)

    def after_training(weights: Tensor) -> Tensor:
        def weighted(params: Mapping[str, Tensor], chosen: Tensor) -> Tensor:
            return (weights[chosen] * errors(apply(params, x[chosen]), y[chosen])).mean()

        step = fz.shard_zero3(fz.train_step(weighted, fz.sgd(RATE, momentum=MOMENTUM)))
        batches = [(rows(update).chunk(ranks)[rank],) for update in range(UPDATES)]
        state, _ = fz.scan(step, step.init(params), batches)
        held = fz.with_fn(step, lambda params, x, y: errors(apply(params, x), y).mean())
        return held.forward(state, *[part.chunk(ranks)[rank] for part in held_out()])

    return {"influence": torch.func.grad(after_training)(torch.ones(EXAMPLES, dtype=torch.float64))}


def plain() -> Mapping[str, Tensor]:
    network = mlp(0, *SIZES)
    call = functools.partial(torch.func.functional_call, network)
    x, y = normal(1, EXAMPLES, 3), normal(2, EXAMPLES, 2)
    params: dict[str, Tensor] = dict(network.named_parameters())
    weights = torch.ones(EXAMPLES, dtype=torch.float64, requires_grad=True)
    momentum = {name: torch.zeros_like(leaf) for name, leaf in params.items()}
    for update in range(UPDATES):
        chosen = rows(update)
        loss = (weights[chosen] * errors(call(params, x[chosen]), y[chosen])).mean()
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        momentum = {name: MOMENTUM * m + g for (name, m), g in zip(momentum.items(), grads, strict=True)}
        params = {name: leaf - RATE * momentum[name] for name, leaf in params.items()}
    held_x, held_y = held_out()
    return {"influence": torch.autograd.grad(errors(call(params, held_x), held_y).mean(), weights)[0]}


if __name__ == "__main__":
    compare(main, plain)
