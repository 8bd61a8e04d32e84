"""What fz.plan says is moved is what steps move, to the byte; and no memory holds more than it says."""

from __future__ import annotations

import functools
import threading
from typing import Any

import exactness
import pytest
import scenarios
import torch
from hypothesis import given
from hypothesis import strategies as st
from memories import DISK, HOST, MEMORIES
from moving import Counts, counted
from nightly import NIGHTLY, by_turns, in_turns

import fzero as fz
from fzero.testing import run_ranks, strategies

CLIPPED = fz.chain(fz.clip_by_global_norm(0.5), fz.adamw(1e-2))
LOSS, PARAMS = scenarios.tiny_lm(dtype=torch.float32)
BATCHES = scenarios.token_batches(2)


def steady(step: fz.Step, params: Any, batches: Any, world: int, steps: int = 2) -> Counts:
    """The counts of the last one of some steps, over all ranks."""
    together = threading.Barrier(world)

    def rank_main(rank: int) -> None:
        state = step.init(params)
        for _ in range(steps):
            together.wait()
            if rank == 0:
                counts.clear()
            together.wait()
            state, _ = step(state, *batches[rank])
        together.wait()

    with counted() as counts:
        run_ranks(rank_main, world)
    return counts


def holds(step: fz.Step, params: Any = PARAMS, batches: Any = BATCHES, world: int = 1) -> fz.Plan:
    plan, counts = fz.plan(step, params, world_size=world), steady(step, params, batches, world)
    if step.microbatches.count == 1:  # of which it does not count the sums
        assert plan.moved == {memory: counts.of(memory, world) for memory in ("host", "disk")}
    assert plan.device + plan.host + plan.disk == plan.params + plan.grads + plan.moments + plan.extra
    for memory in ("host", "disk"):
        assert counts.most[memory] <= plan.peak[memory] * world, memory
    return plan


WAYS = {
    "plain": [],
    "donate": [fz.donate],
    "remat": [fz.remat],
    "scaled": [lambda step: fz.loss_scale(step, 64.0)],
    "accumulated": [lambda step: fz.accumulate(step, 2)],
    "accumulated, fused": [fz.fuse_update, lambda step: fz.accumulate(step, 2)],
    **{f"fused, {norm}": [functools.partial(fz.fuse_update, norm=norm)] for norm in ("auto", "twice", "held")},
    "fused, remat, donate": [fz.fuse_update, fz.remat, fz.donate],
}


@in_turns(10)
@pytest.mark.parametrize(("way", "stage"), by_turns(WAYS, [0, 3]))  # a drawn composition has any of them
def test_what_each_kind_moves(way: str, stage: int) -> None:
    step = exactness.SHARDS[stage](fz.train_step(LOSS, CLIPPED))
    for transform in WAYS[way]:
        step = transform(step)
    for number, kind in enumerate(("params", "grads", "moments")):
        for memory in MEMORIES if NIGHTLY else (MEMORIES[(number + stage) % 2],):
            away: dict[str, Any] = {kind: memory}
            holds(fz.offload(step, **away), world=2 if stage else 1)


SCHEMES = {
    "exact": fz.Policy.exact(),
    "compact24": fz.Policy.compact24(),
    "compact16": fz.Policy.compact16(),
    "4-bit": fz.Policy.compact16("4-bit"),
    "masters": fz.Policy(param=torch.float32, grad=torch.bfloat16, compute=torch.bfloat16),
    "by 8-bit": fz.Policy(gather="8-bit"),
}


@in_turns(7)
@pytest.mark.parametrize(("scheme", "stage"), by_turns(SCHEMES, [0, 1, 3]))
def test_every_scheme(scheme: str, stage: int) -> None:
    for row, optimizer in enumerate((fz.adamw(1e-2), fz.sgd(0.1))):
        step = exactness.SHARDS[stage](fz.train_step(LOSS, optimizer, SCHEMES[scheme]))
        for column, one in enumerate((step, fz.fuse_update(step))):
            if not NIGHTLY and (row + column + len(scheme)) % 2:
                continue
            for memory in MEMORIES if NIGHTLY else (MEMORIES[(column + stage) % 2],):
                holds(fz.offload(one, params=memory, grads=memory, moments=memory), world=2 if stage else 1)


def test_an_optimizer_that_returns_new_moments() -> None:
    own = fz.GradientTransformation(*fz.adamw(1e-2)[:2])
    step = fz.train_step(LOSS, own)
    for memory in MEMORIES:
        plan = holds(fz.offload(step, params=memory, grads=memory, moments=memory))
        assert sum(plan.moved[plan_name(memory)]) > 0


def plan_name(memory: Any) -> str:
    return "host" if memory == HOST else "disk"


def test_frozen_leaves_are_fetched_and_not_written() -> None:
    step = fz.freeze(fz.train_step(LOSS, fz.adamw(1e-2)), "blocks.*.up.*")
    plan = holds(fz.offload(step, params=DISK))
    assert plan.moved["disk"][1] < plan.params
    holds(fz.shard_zero1(fz.offload(step, params=DISK, moments=HOST)), world=2)


@given(
    scenario=st.sampled_from(sorted(exactness.SCENARIOS)),
    chosen=strategies.transforms(patterns=scenarios.BLOCKS, memories=MEMORIES),
    world=st.integers(1, 3),
)
def test_any_composition(scenario: str, chosen: Any, world: int) -> None:
    chosen = [pair for pair in chosen if not pair[0].startswith("offload(activations")]
    make, batches = exactness.SCENARIOS[scenario]
    loss, params = make()
    step = strategies.apply(fz.train_step(loss, CLIPPED), chosen)
    world = world if any("shard" in name for name, _ in chosen) else 1
    holds(step, params, batches(world), world)
