"""torch.vmap of a step over stacked states: every member is what a run of its own makes of it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import scenarios
import torch
import torch.utils._pytree as pytree
from ensembles import F64, MEMBERS, OPTIMIZERS, batches_at, of_members, same_states, stacked, usable
from exactness import SCENARIOS, SHARDS
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_day, in_turns

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks, strategies

pytestmark = pytest.mark.usefixtures("hazards")  # races show

CHOSEN = strategies.transforms(stages=(0, 1, 2, 3), patterns=scenarios.BLOCKS)


@by_day(6)
@given(
    chosen=CHOSEN,
    world=st.integers(1, 3),
    scenario=st.sampled_from(sorted(SCENARIOS)),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    frozen=st.sampled_from(["", *scenarios.BLOCKS]),
    dynamic=st.booleans(),
    rates=st.booleans(),
    vmap=st.sampled_from([torch.vmap, torch.func.vmap]),
)
def test_an_ensemble_is_its_members_runs(
    chosen: Any, world: int, scenario: str, optimizer: str, frozen: str, dynamic: bool, rates: bool, vmap: Any
) -> None:
    loss, params = of_members(scenario)
    batches_of = SCENARIOS[scenario][1]
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
            run = vmap(lambda lr, state, *inputs: step_of(lr)(state, *inputs))
        else:
            run = vmap(singles[0])
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


def by_verbs(step: fz.Step, state: fz.TrainState, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Everything that can be asked of a step, one after the other, as full tensors."""
    out, pullback = step.vjp(state, x, y)
    grads, cotangents = pullback(2 * torch.ones_like(out))
    kept = step.add_grads(state, grads)
    again, halves = step.vjp(kept, x, y)
    inputs = halves.inputs(torch.ones_like(again))
    second = halves.params()
    norm = fz.global_norm(second, grads)
    new, metrics = step.update(kept, second, grad_norm=norm)
    after = step.forward(new, x, y)
    full = fz.gather([grads, second, kept.grads, new.params, new.moments])
    full = [x for x in pytree.tree_leaves(full) if x is not None]  # which torch.vmap takes for a leaf
    return out, cotangents, inputs, norm, metrics, after, full, new


@by_day(6)
@given(
    chosen=CHOSEN,
    world=st.integers(1, 3),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    data=st.sampled_from(["each its own", "the same", "one member"]),
)
def test_every_verb(chosen: Any, world: int, optimizer: str, data: str) -> None:
    """vjp, both halves, add_grads, update, forward, gather and global_norm; what is not mapped is the same for all."""
    loss, params = of_members("unit")
    batches = batches_at(world)

    def rank_main(rank: int) -> None:
        step = strategies.apply(fz.train_step(loss, OPTIMIZERS[optimizer](0.1)), usable(chosen))
        states, pairs = [step.init(p) for p in params], batches[rank]
        dims: Any = {"each its own": (0, 0, 0), "the same": (0, None, None), "one member": (None, 0, 0)}[data]
        states = [states[0]] * MEMBERS if data == "one member" else states
        pairs = [pairs[0]] * MEMBERS if data == "the same" else pairs
        given = (states[0] if dims[0] is None else fz.stack(states), *(pairs[0] if dims[1] is None else stacked(pairs)))
        run: Any = torch.vmap(functools.partial(by_verbs, step), in_dims=dims)
        *found, new = run(*given)
        wanted = [by_verbs(step, state, *pair) for state, pair in zip(states, pairs, strict=True)]
        for i, (*want, single) in enumerate(wanted):
            own = pytree.tree_map(lambda x, i=i: x[i], found)
            assert_trees_close(own, want, rtol=1e-9, atol=1e-12)
            same_states(fz.unstack(new)[i], single, rtol=1e-9)

    run_ranks(rank_main, world)


def test_dims_chunks_and_nesting() -> None:
    loss, params = of_members("unit")
    step = fz.train_step(loss, fz.adamw(0.1))
    states, (pairs,) = [step.init(p) for p in params], batches_at(1)
    x, y = stacked(pairs)
    want = [step(state, *pair)[0] for state, pair in zip(states, pairs, strict=True)]
    ensemble = fz.stack(states)
    runs = [
        torch.vmap(step, in_dims=(0, 1, 2))(ensemble, x.movedim(0, 1), y.movedim(0, 2)),
        torch.vmap(step, chunk_size=2)(ensemble, x, y),
    ]
    for new, _ in runs:
        for found, single in zip(fz.unstack(new), want, strict=True):
            same_states(found, single)
    twice = fz.stack([ensemble, fz.stack(states[::-1])])
    inside: Any = torch.vmap(step)
    new, _ = torch.vmap(inside)(twice, torch.stack([x, x.flip(0)]), torch.stack([y, y.flip(0)]))
    first, second = map(fz.unstack, fz.unstack(new))
    for found, single in zip((*first, *second[::-1]), (*want, *want), strict=True):
        same_states(found, single)


@in_turns(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_derivatives_of_an_ensemble(stage: int) -> None:
    """By what all members share, through an update of each and an evaluation."""
    loss, params = of_members("unit")
    batches = batches_at(2)

    def rank_main(rank: int) -> None:
        def after(lr: torch.Tensor, x: torch.Tensor, maps: bool) -> torch.Tensor:
            step = SHARDS[stage](fz.train_step(loss, fz.sgd(lr, momentum=0.9)))
            states, pairs = [step.init(p) for p in params], batches[rank]

            def run(state: fz.TrainState, own: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                return step.forward(step(state, x + own, y)[0], own, y)

            if maps:
                return torch.vmap(run)(fz.stack(states), *stacked(pairs)).sum()
            return torch.stack([run(state, *pair) for state, pair in zip(states, pairs, strict=True)]).sum()

        lr, x = torch.tensor(0.1, dtype=F64), batches[rank][0][0]
        found, want = [torch.func.grad(after, argnums=(0, 1))(lr, x, maps) for maps in (True, False)]
        assert all(g.abs().max() > 1e-4 for g in want)
        assert_trees_close(found, want, rtol=1e-9)
        pushed, wanted = [
            torch.func.jvp(lambda lr, maps=maps: after(lr, x, maps), (lr,), (torch.ones_like(lr),))
            for maps in (True, False)
        ]
        assert_trees_close(pushed, wanted, rtol=1e-9)

    run_ranks(rank_main, 2 if stage else 1)
