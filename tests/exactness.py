"""A training of some steps in any composition of transforms, against the plain float64 step."""

from __future__ import annotations

import functools
from typing import Any

import scenarios
import torch
from nightly import NIGHTLY
from reference import adamw_steps

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks, strategies

STEPS = 5 if NIGHTLY else 3
SCENARIOS: dict[str, Any] = {
    "module": (scenarios.tiny_lm, scenarios.token_batches),
    "unit": (scenarios.stack, scenarios.vector_batches),
}
SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}


def train(rank: int, scenario: str, chosen: Any, world: int, steps: int = STEPS) -> Any:
    make, batches = SCENARIOS[scenario]
    loss, params = make()
    step = fz.train_step(loss, fz.chain(fz.clip_by_global_norm(0.5), fz.adamw(1e-2)))
    step = strategies.apply(step, chosen)
    state = step.init(params)
    batch = batches(world)[rank]
    losses, norms = [], []
    for _ in range(steps):
        state, metrics = step(state, *batch)
        losses.append(metrics["loss"].item())
        norms.append(metrics["grad_norm"].item())
    return fz.gather(state.params), losses, norms


@functools.cache
def expected(scenario: str, world: int) -> Any:
    make, batches = SCENARIOS[scenario]
    loss, params = make()
    return adamw_steps(loss, params, batches(world), STEPS, max_norm=0.5)


def check(scenario: str, chosen: Any, world: int, **run: Any) -> None:
    fn = functools.partial(train, scenario=scenario, chosen=chosen, world=world)
    params, losses, norms = expected(scenario, world)
    for got in run_ranks(fn, world, **run):
        assert_trees_close(got[0], params, rtol=1e-10)
        assert torch.allclose(torch.tensor(got[1]), torch.tensor(losses), rtol=1e-10, atol=0)
        assert torch.allclose(torch.tensor(got[2]), torch.tensor(norms), rtol=1e-10, atol=0)
