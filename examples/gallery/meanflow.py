"""Flow matching with a jvp inside the loss (MeanFlow, arXiv 2505.13447), over params that are cut by ZeRO-3.

The target needs the derivative of the network along a tangent of its inputs. pytorch/pytorch#182641 reports that
`torch.func.jvp` does not go through FSDP2, whose hooks stand in its way; since torch 2.13 it does. Here a unit is a
function, so the loss is written as for one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from common import compare, mlp, normal
from torch import Tensor

import fzero as fz

STEPS, EXAMPLES, DIMS = 5, 12, 3


def batch(update: int) -> tuple[Tensor, ...]:
    """Data, noise, and two times `r <= t` of each example."""
    r, t = torch.sigmoid(normal(3 * update + 2, 2, EXAMPLES, 1)).sort(dim=0).values
    return normal(3 * update, EXAMPLES, DIMS).tanh(), normal(3 * update + 1, EXAMPLES, DIMS), r, t


def loss(network: Callable[[Tensor], Tensor], x: Tensor, noise: Tensor, r: Tensor, t: Tensor) -> Tensor:
    def mean_velocity(z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        return network(torch.cat([z, r, t], dim=1))

    z, velocity = (1 - t) * x + t * noise, noise - x
    along = velocity, torch.zeros_like(r), torch.ones_like(t)
    u, along_the_flow = torch.func.jvp(mean_velocity, (z, r, t), along)  # type: ignore[misc]
    return (u - (velocity - (t - r) * along_the_flow).detach()).square().mean()


def main(rank: int, ranks: int) -> Mapping[str, Tensor]:
    apply, params = fz.functional(mlp(0, DIMS + 2, 16, 16, DIMS))
    fn = lambda params, *batch: loss(functools.partial(apply, params), *batch)
    step = fz.shard_zero3(fz.train_step(fn, fz.adamw(1e-2)))
    state = step.init(params)
    for update in range(STEPS):
        state, _ = step(state, *[x.chunk(ranks)[rank] for x in batch(update)])
    return fz.gather(state.params)


def plain() -> Mapping[str, Tensor]:
    network = mlp(0, DIMS + 2, 16, 16, DIMS)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for update in range(STEPS):
        optimizer.zero_grad()
        loss(network, *batch(update)).backward()
        optimizer.step()
    return {name: param.detach() for name, param in network.named_parameters()}


if __name__ == "__main__":
    compare(main, plain)
