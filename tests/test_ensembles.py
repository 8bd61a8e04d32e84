"""torch.vmap of a step over stacked states: every member is what a run of its own makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import scenarios
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks, strategies

pytestmark = pytest.mark.usefixtures("hazards")  # races show

F64 = torch.float64
MEMBERS = 3
CHOSEN = strategies.transforms(stages=(0, 1, 2, 3), patterns=scenarios.BLOCKS)
OPTIMIZERS: dict[str, Callable[[Any], fz.GradientTransformation]] = {
    "sgd": lambda lr: fz.sgd(lr, weight_decay=0.1),
    "momentum": lambda lr: fz.sgd(lr, momentum=0.9),
    "adamw": lambda lr: fz.adamw(lr),
    "adam": lambda lr: fz.adam(lr, weight_decay=0.1),
    "lion": lambda lr: fz.lion(lr),
    "clipped": lambda lr: fz.chain(fz.clip_by_global_norm(0.3), fz.adamw(lr)),
    "clamped": lambda lr: fz.chain(fz.clip_by_value(0.02), fz.sgd(lr)),
    "scheduled": lambda lr: fz.adamw(fz.linear(lr, lr * 0.1, 3)),
    "partition": lambda lr: fz.partition(
        {"blocks.0.*": fz.sgd(lr), "*": fz.chain(fz.clip_by_global_norm(1.0), fz.adam(lr))}
    ),
}
SCENARIOS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "unit": (scenarios.stack, scenarios.vector_batches),
    "module": (scenarios.tiny_lm, scenarios.token_batches),
}


def stacked(batches: Sequence[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.stack(parts) for parts in zip(*batches, strict=True))


def same_states(found: fz.TrainState, want: fz.TrainState, rtol: float = 1e-10) -> None:
    assert (found.step, found.signature) == (want.step, want.signature)
    for own, its in ((found.params, want.params), (found.moments, want.moments), (found.extra, want.extra)):
        assert_trees_close(own, its, rtol=rtol, atol=1e-13)
    assert_trees_close(fz.gather(found.params), fz.gather(want.params), rtol=rtol, atol=1e-13)


def usable(chosen: Any) -> Any:
    return [pair for pair in chosen if pair[0] != "donate"]


@given(
    chosen=CHOSEN,
    world=st.integers(1, 3),
    scenario=st.sampled_from(sorted(SCENARIOS)),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    frozen=st.sampled_from(["", *scenarios.BLOCKS]),
    dynamic=st.booleans(),
    rates=st.booleans(),
    names=st.sampled_from([torch.vmap, torch.func.vmap]),
)
def test_an_ensemble_is_its_members_runs(
    chosen: Any, world: int, scenario: str, optimizer: str, frozen: str, dynamic: bool, rates: bool, names: Any
) -> None:
    make, batches_of = SCENARIOS[scenario]
    loss = make()[0]
    params = [make(seed=seed)[1] for seed in range(MEMBERS)]
    lrs = torch.tensor([0.1, 0.03, 0.3], dtype=F64) if rates else torch.full((MEMBERS,), 0.1, dtype=F64)
    chosen = usable(chosen)
    dynamic = dynamic and not any(name == "loss_scale" for name, _ in chosen)

    def step_of(lr: Any) -> fz.Step:
        step = strategies.apply(fz.train_step(loss, OPTIMIZERS[optimizer](lr)), chosen)
        step = fz.freeze(step, frozen) if frozen else step
        return fz.loss_scale(step, initial=64.0, interval=2) if dynamic else step

    def rank_main(rank: int) -> None:
        singles = [step_of(lr.item()) for lr in lrs]
        states = [step.init(p) for step, p in zip(singles, params, strict=True)]
        if rates:
            run = names(lambda lr, state, *inputs: step_of(lr)(state, *inputs))
        else:
            run = names(singles[0])
        ensemble = fz.stack(states)
        for update in range(3):
            batches = [batches_of(world, seed=10 * update + member)[rank] for member in range(MEMBERS)]
            ensemble, metrics = run(*([lrs] if rates else []), ensemble, *stacked(batches))
            pairs = [step(state, *batch) for step, state, batch in zip(singles, states, batches, strict=True)]
            states = [state for state, _ in pairs]
            want = {name: torch.stack([own[name] for _, own in pairs]) for name in metrics}
            assert_trees_close(metrics, want, rtol=1e-10)
            assert all(x.shape[0] == MEMBERS for x in metrics.values())
        for found, state in zip(fz.unstack(ensemble), states, strict=True):
            same_states(found, state)
        # and each goes on by itself
        for i, found in enumerate(fz.unstack(ensemble)):
            batch = batches_of(world, seed=99)[rank]
            same_states(singles[i](found, *batch)[0], singles[i](states[i], *batch)[0])

    run_ranks(rank_main, world)
