"""The same model under FSDP2, on real gloo ranks: losses within 1e-6 relative over 20 steps."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import scenarios
import torch
from nightly import in_turns

import fzero as fz
from fzero.testing import run_ranks

SHARDS: dict[int, Any] = {1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}


def both(rank: int, stage: int) -> tuple[list[float], list[float]]:
    from torch.distributed.fsdp import fully_shard

    module = scenarios.tiny_module(width=16, dtype=torch.float32)
    del module.unused  # FSDP2 wants every parameter used
    apply, params = fz.functional(module)
    step = SHARDS[stage](fz.train_step(lambda p, x, y: scenarios.loss_of(apply(p, x), y), fz.adamw(1e-2)))
    state, x, y = step.init(params), *scenarios.token_batches(2)[rank]
    ours, theirs = [], []
    for _ in range(20):
        state, metrics = step(state, x, y)
        ours.append(metrics["loss"].item())
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.01)
    for _ in range(20):
        loss = scenarios.loss_of(module(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        theirs.append(mean.item() / 2)
    return ours, theirs


@in_turns(3)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_of_fsdp2(stage: int) -> None:
    ours, theirs = run_ranks(functools.partial(both, stage=stage), 2, backend="processes")[0]
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert theirs[-1] < 0.7 * theirs[0]
