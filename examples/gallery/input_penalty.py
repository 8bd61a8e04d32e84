"""A critic whose gradient by its inputs is held to length one (WGAN-GP, arXiv 1704.00028), under ZeRO-3.

The penalty is a derivative inside the loss, so training takes second derivatives. pytorch/pytorch#172543 reports that
FSDP2 raises there; the answer, `set_reshard_after_backward(False)`, keeps all params whole, and gradients stay on their
rank until one more backward reduces them. Here params are gathered for the second derivative, too, and freed again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from common import compare, mlp, normal
from torch import Tensor

import fzero as fz

STEPS, EXAMPLES, DIMS = 5, 12, 3


def batch(update: int) -> tuple[Tensor, Tensor, Tensor]:
    """Real examples, fake ones, and where between the two the slope is measured."""
    between = torch.sigmoid(normal(3 * update + 2, EXAMPLES, 1))
    return normal(3 * update, EXAMPLES, DIMS).tanh(), normal(3 * update + 1, EXAMPLES, DIMS), between


def loss(critic: Callable[[Tensor], Tensor], real: Tensor, fake: Tensor, between: Tensor) -> Tensor:
    slope = torch.func.grad(lambda x: critic(x).sum())(between * real + (1 - between) * fake)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    return critic(fake).mean() - critic(real).mean() + 10 * penalty


def main(rank: int, ranks: int) -> Mapping[str, Tensor]:
    apply, params = fz.functional(mlp(0, DIMS, 16, 16, 1))
    fn = lambda params, *batch: loss(functools.partial(apply, params), *batch)
    step = fz.shard_zero3(fz.train_step(fn, fz.adamw(1e-2)))
    state = step.init(params)
    for update in range(STEPS):
        state, _ = step(state, *[x.chunk(ranks)[rank] for x in batch(update)])
    return fz.gather(state.params)


def plain() -> Mapping[str, Tensor]:
    critic = mlp(0, DIMS, 16, 16, 1)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-2)
    for update in range(STEPS):
        optimizer.zero_grad()
        loss(critic, *batch(update)).backward()
        optimizer.step()
    return {name: param.detach() for name, param in critic.named_parameters()}


if __name__ == "__main__":
    compare(main, plain)
