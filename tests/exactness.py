"""A training of some steps in any composition of transforms, against the plain float64 step."""

from __future__ import annotations

import functools
from typing import Any

import scenarios
import torch
from nightly import NIGHTLY
from reference import adamw_steps

import fzero as fz
from fzero.base import pytree
from fzero.testing import assert_trees_close, run_ranks, strategies

STEPS = 5 if NIGHTLY else 3
SCENARIOS: dict[str, Any] = {
    "module": (scenarios.tiny_lm, scenarios.token_batches),
    "unit": (scenarios.stack, scenarios.vector_batches),
}
SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}


def there(tree: Any, device: str | torch.device) -> Any:
    return pytree.map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, tree)


def train(rank: int, scenario: str, chosen: Any, world: int, steps: int = STEPS, device: str = "cpu") -> Any:
    make, batches = SCENARIOS[scenario]
    loss, params = make()
    step = fz.train_step(loss, fz.chain(fz.clip_by_global_norm(0.5), fz.adamw(1e-2)))
    step = strategies.apply(step, chosen)
    state = step.init(there(params, device))
    batch = there(batches(world)[rank], device)
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


def check(scenario: str, chosen: Any, world: int, device: str = "cpu", rtol: float = 1e-10, **run: Any) -> None:
    fn = functools.partial(train, scenario=scenario, chosen=chosen, world=world, device=device)
    params, losses, norms = expected(scenario, world)
    for got in run_ranks(fn, world, **run):
        assert {leaf.device for leaf in pytree.leaves(got[0])} == {torch.device(device)}
        assert_trees_close(there(got[0], "cpu"), params, rtol=rtol)
        assert torch.allclose(torch.tensor(got[1]), torch.tensor(losses), rtol=rtol, atol=0)
        assert torch.allclose(torch.tensor(got[2]), torch.tensor(norms), rtol=rtol, atol=0)
