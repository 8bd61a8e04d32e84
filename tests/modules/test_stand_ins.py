"""Maps between ranks of what stands for a tensor: pieces of tokens, and leaves of other units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nightly import in_turns
from torch import nn

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

F64 = torch.float64
Way = Callable[[torch.Tensor], torch.Tensor]


class Tied(nn.Module):
    """A piece of the tokens, and the weight of a unit, go through a map."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.way = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4), way
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.down(torch.tanh(self.up(x))))
        for block in self.blocks:
            x = block(x)
        first: Any = self.blocks[0]
        return self.way(x).cumsum(1) @ self.way(first.weight)


MAPS: dict[str, Callable[[Any], Way]] = {
    "copy": lambda ax: lambda x: fz.parallel.copy(x, ax),
    "sum": lambda ax: lambda x: fz.parallel.sum(x, ax),
    "gather": lambda ax: lambda x: fz.parallel.gather(x, ax, 0),
    "split": lambda ax: lambda x: fz.parallel.split(x, ax, 0),
    "shift": lambda ax: lambda x: fz.parallel.ring_shift(x, ax),
}


@in_turns(10)
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_over_an_axis_of_one_rank(name: str, sequence: bool, stage: int) -> None:
    torch.manual_seed(0)
    x, plan = torch.randn(2, 5, 4, dtype=F64), {"up": "column", "down": "row"}
    apply, params = fz.functional(Tied(lambda x: x).to(F64))
    want = torch.func.grad(lambda p: apply(p, x).square().mean())(dict(params))

    def rank_main(rank: int) -> Any:
        mesh = torch.distributed.init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp", "other", "tp"))
        own, _ = fz.functional(Tied(MAPS[name](fz.parallel.axis(mesh, "other"))).to(F64))
        step = fz.train_step(lambda p: own(p, x).square().mean(), fz.sgd(0.1))
        step = fz.shard_tensor(step, plan, mesh=mesh, sequence=sequence)
        step = (fz.shard_zero1 if stage == 1 else fz.shard_zero3)(step, mesh=mesh, axis="dp")
        return dict(fz.gather(step.vjp(step.init(params))[1](torch.ones((), dtype=F64))[0]))

    for found in run_ranks(rank_main, 2):
        assert_trees_close(found, want, rtol=1e-10, atol=1e-12)
