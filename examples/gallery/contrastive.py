"""A contrastive loss over all ranks' examples, with the gradients of embeddings cached (GradCache, arXiv 2101.06983).

The batch is too large for one graph: it is embedded without one, the loss of all embeddings gives each its cotangent,
and these are pulled back in microbatches. huggingface/sentence-transformers#3173 and texttron/tevatron#206 report that
DeepSpeed fails there: a gradient may come to its partition only once. Here a step takes a cotangent.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from common import compare, mlp, normal
from torch import Tensor

import fzero as fz

STEPS, PAIRS, SCALE = 5, 12, 5.0


def batch(update: int) -> Tensor:
    """Queries and what answers them, [pairs, 2, features]."""
    return normal(update, PAIRS, 2, 6)


def loss(queries: Tensor, answers: Tensor, first: int) -> Tensor:
    """Each query picks its answer, of which query 0 has number `first`, out of all."""
    similar = SCALE * F.normalize(queries, dim=1) @ F.normalize(answers, dim=1).T
    return F.cross_entropy(similar, first + torch.arange(len(queries)))


def main(rank: int, ranks: int) -> Mapping[str, Tensor]:
    apply, params = fz.functional(mlp(0, 6, 32, 4))
    step = fz.shard_zero3(fz.train_step(apply, fz.adamw(1e-2)))  # gives embeddings, [pairs, 2, 4]
    step = fz.accumulate(step, 3)  # microbatches of two pairs on two ranks
    state, axis = step.init(params), fz.parallel.axis(None, "dp")

    def of_all(embedded: Tensor) -> Tensor:
        answers = fz.parallel.gather(embedded[:, 1], axis, 0, own=True)  # each rank has a loss of its own
        return loss(embedded[:, 0], answers, rank * len(embedded))

    for update in range(STEPS):
        x = batch(update).chunk(ranks)[rank]
        cotangent = torch.func.grad(of_all)(step.forward(state, x))
        state, _ = step(state, x, cotangent=cotangent)
    return fz.gather(state.params)


def plain() -> Mapping[str, Tensor]:
    network = mlp(0, 6, 32, 4)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for update in range(STEPS):
        optimizer.zero_grad()
        loss(*network(batch(update)).unbind(1), first=0).backward()  # all at once
        optimizer.step()
    return {name: param.detach() for name, param in network.named_parameters()}


if __name__ == "__main__":
    compare(main, plain)
