"""Training with differential privacy (DP-SGD, arXiv 1607.00133): each example's gradient is clipped by itself.

In awslabs/fast-differential-privacy#9 a privacy engine refuses the layers that FSDP has wrapped; a prototype for FSDP2,
meta-pytorch/opacus#761, takes the layers that it has formulas for. Here `fz.per_example_grads` takes any function of
params; it gathers them on each rank, so the model must fit there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import compare, mlp, normal
from torch import Tensor

import fzero as fz

STEPS, EXAMPLES, CLIP, NOISE = 5, 12, 0.1, 0.5


def batch(update: int) -> tuple[Tensor, Tensor]:
    return normal(2 * update, EXAMPLES, 3), normal(2 * update + 1, EXAMPLES, 2)


def loss(network: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(network(x), y)


def noisy(clipped: Tensor, update: int) -> Tensor:
    """The sum over all examples, with noise; a real run takes a seed that nobody can guess."""
    return (clipped + NOISE * CLIP * normal(100 + update, *clipped.shape)) / EXAMPLES


def main(rank: int, ranks: int) -> Mapping[str, Tensor]:
    apply, params = fz.functional(mlp(0, 3, 16, 2))
    fn = lambda params, x, y: loss(lambda x: apply(params, x), x, y)
    step = fz.shard_zero3(fz.train_step(fn, fz.adamw(1e-2)))
    state = step.init(params)
    for update in range(STEPS):
        each = fz.per_example_grads(step, state, *[x.chunk(ranks)[rank] for x in batch(update)])
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        weights = (CLIP / norms).clamp(max=1)
        sums = {name: torch.tensordot(weights, g, 1) for name, g in each.items()}  # over this rank's examples
        for g in sums.values():
            dist.all_reduce(g)
        state, _ = step.update(state, {name: noisy(g, update) for name, g in sums.items()})
    return fz.gather(state.params)


def plain() -> Mapping[str, Tensor]:
    network = mlp(0, 3, 16, 2)
    leaves = dict(network.named_parameters())
    optimizer = torch.optim.AdamW(leaves.values(), lr=1e-2)
    for update in range(STEPS):
        optimizer.zero_grad()
        for x, y in zip(*batch(update), strict=True):
            grads = torch.autograd.grad(loss(network, x[None], y[None]), list(leaves.values()))
            norm = torch.cat([g.flatten() for g in grads]).norm()
            for leaf, g in zip(leaves.values(), grads, strict=True):
                clipped = g * min(1.0, CLIP / norm.item())
                leaf.grad = clipped if leaf.grad is None else leaf.grad + clipped
        for leaf in leaves.values():
            assert leaf.grad is not None
            leaf.grad = noisy(leaf.grad, update)
        optimizer.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


if __name__ == "__main__":
    compare(main, plain)
