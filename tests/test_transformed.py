"""A step is a function: derivatives and maps of whole runs, drawn, against those of plain torch in one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import whole_runs
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_day, in_turns

import fzero as fz
from fzero.testing import run_ranks, strategies

pytestmark = pytest.mark.usefixtures("hazards")  # races show

SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}
HOW = ("step", "vjp", "scan")


def check(scenario: str, optimizer: str, steps: int, ranks: int, chosen: Any, how: str, name: str, **run: Any) -> None:
    want = whole_runs.wanted(scenario, optimizer, steps, ranks, name)
    case = functools.partial(
        whole_runs.on_rank,
        scenario=scenario, optimizer=optimizer, steps=steps, ranks=ranks, chosen=chosen, how=how, name=name,
    )  # fmt: skip
    whole_runs.assert_found(run_ranks(case, ranks, **run), want, name)


@by_day(6)
@given(
    chosen=strategies.transforms(),
    world=st.integers(1, 3),
    scenario=st.sampled_from(sorted(whole_runs.SCENARIOS)),
    optimizer=st.sampled_from(sorted(whole_runs.OPTIMIZERS)),
    how=st.sampled_from(HOW),
    name=st.sampled_from(sorted(whole_runs.TRANSFORMS)),
    steps=st.integers(1, 3),
)
def test_whole_runs(chosen: Any, world: int, scenario: str, optimizer: str, how: str, name: str, steps: int) -> None:
    chosen = [(said, each) for said, each in chosen if said != "donate"]
    sharded = any("shard" in said for said, _ in chosen)
    check(scenario, optimizer, steps, world if sharded else 1, chosen, how, name)


@in_turns(8)
@pytest.mark.parametrize("name", ["grad", "grad_of_grad", "pushed_grad", "grads_over_rates"])
@pytest.mark.parametrize("stage", [1, 3])
def test_whole_runs_on_real_processes(stage: int, name: str) -> None:
    chosen = [("shard", SHARDS[stage]), ("remat", fz.remat)]
    how = {"grad": "scan", "grad_of_grad": "step"}.get(name, "vjp")
    check("unit", "clipped", 2, 2, chosen, how, name, backend="processes")
