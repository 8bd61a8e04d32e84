"""fz.jit of functions whose steps draw random numbers: those of the function, others in each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import in_turns

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

F64 = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(3, 8, dtype=F64, generator=GENERATOR)
PARAMS = {"blocks": [{"w": torch.randn(8, 8, dtype=F64, generator=GENERATOR) / 3} for _ in range(2)]}
block = fz.unit(lambda p, x: F.dropout(F.dropout(x @ p["w"], 0.3), 0.2))


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    x = F.dropout(x, 0.1)
    for q in p["blocks"]:
        x = block(q, x)
    return (x + torch.rand_like(x) + torch.randn(8)).square().mean()


def two(step: fz.Step, state: fz.TrainState, x: torch.Tensor) -> Any:
    losses = []
    for _ in range(2):
        state, metrics = step(state, x)
        losses.append(metrics["loss"])
    return losses, step.forward(state, x), step.forward(state, x, rng=1)


def by_input(step: fz.Step, state: fz.TrainState, x: torch.Tensor) -> Any:
    return torch.func.grad(lambda x: two(step, state, x)[1])(x)


def own_start(step: fz.Step, state: fz.TrainState, x: torch.Tensor) -> Any:
    return two(step, step.init(PARAMS, seed=3), x)[:2]


def pushed(step: fz.Step, state: fz.TrainState, x: torch.Tensor) -> Any:
    return torch.func.jvp(lambda x: two(step, state, x)[1], (x,), (x,))


def returned(step: fz.Step, state: fz.TrainState, x: torch.Tensor) -> Any:
    return two(step, state, x)[1], state.seed * x, state.seed, state


CASES = {"steps": two, "gradient": by_input, "init": own_start, "jvp": pushed, "returned": returned}
SEEDS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=2, unique=True)


def compare(name: str, backend: str, rank: int = 0, zero: bool = False, seeds: tuple[int, ...] = (0, 0, 0)) -> None:
    step = fz.train_step(loss, fz.sgd(1e-2))
    step = fz.shard_zero3(step) if zero else step
    fn = lambda state, x: CASES[name](step, state, x)
    fast, state = fz.jit(fn, backend=backend), step.init(PARAMS)
    seen: list[Any] = []
    for seed in seeds:
        state = state.replace(seed=seed)
        before = torch.random.get_rng_state()
        want, got = fn(state, X + rank), fast(state, X + rank)
        assert_trees_close(got, want, rtol=1e-12 if backend == "graph" else 1e-10)
        assert torch.equal(before, torch.random.get_rng_state())
        seen.append(got)
        state, _ = step(state, X + rank)
    assert fast.traces == 1
    if name != "init":
        assert repr(seen[-2]) != repr(seen[-1])  # the count of updates decides
        assert name != "returned" or [(own[2], own[3].seed) for own in seen] == [(seed, seed) for seed in seeds]


@in_turns(2)  # on ranks each day
@pytest.mark.parametrize("name", ["init", "jvp"])
def test_numbers_of_the_function(name: str) -> None:
    compare(name, "graph")


@settings(max_examples=8)
@given(name=st.sampled_from(sorted(CASES)), zero=st.booleans(), seeds=SEEDS)
def test_seeds_are_inputs(name: str, zero: bool, seeds: list[int]) -> None:
    run_ranks(lambda rank: compare(name, "graph", rank, zero, (0, *seeds)), 1 + zero)


@settings(max_examples=8)
@given(seeds=SEEDS)
def test_masks_to_the_bit(seeds: list[int]) -> None:
    step = fz.train_step(loss, fz.sgd(1e-2))
    fast = fz.jit(step.forward, backend="graph")
    first, *others = [step.init(PARAMS, seed=seed) for seed in (0, *seeds)]
    drawn = [fast(state, X) for state in (first, *others)]
    assert all(map(torch.equal, drawn, [step.forward(state, X) for state in (first, *others)]))
    assert fast.traces == 1 and len(set(map(float, drawn))) == len({0, *seeds})
    with pytest.raises(ValueError, match="another seed"):
        fast(first.replace(seed=2**63), X)
    with pytest.raises(TypeError, match="got seed=a tensor"):
        fz.jit(lambda state: state.replace(seed=state.seed + 1), backend="graph")(first)


@in_turns(12, "compiled by torch")
def test_inductor() -> None:
    compare("gradient", "inductor")


@in_turns(2)
@pytest.mark.parametrize("name", ["steps", "gradient"])
def test_on_ranks(name: str) -> None:
    """On threads, none of which is the main one."""
    run_ranks(lambda rank: compare(name, "graph", rank, zero=True), 2)
