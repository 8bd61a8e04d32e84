"""torch.vmap of a step over stacked states: every member is what a run of its own makes of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import scenarios
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st

import fzero as fz
from fzero.testing import RankError, assert_trees_close, assert_trees_equal, run_ranks, strategies

pytestmark = pytest.mark.usefixtures("hazards")  # races show

F64 = torch.float64
MEMBERS = 3
SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}
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
    return [pair for pair in chosen if pair[0] != "donate"]  # which is refused


def of_members(scenario: str, **sizes: Any) -> tuple[Any, list[Any]]:
    """The function and the members' params."""
    make = SCENARIOS[scenario][0]
    return make(**sizes)[0], [make(seed=seed, **sizes)[1] for seed in range(MEMBERS)]


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


def batches_at(world: int, seed: int = 0, **sizes: Any) -> list[list[Any]]:
    """Rank -> each member's batch."""
    drawn = [scenarios.vector_batches(world, seed=seed + member, **sizes) for member in range(MEMBERS)]
    return [[drawn[member][rank] for member in range(MEMBERS)] for rank in range(world)]


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
    full = [fz.gather(tree) for tree in (grads, second, kept.grads, new.params, new.moments)]
    return out, cotangents, inputs, norm, metrics, after, full, new


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
        given = (
            states[0] if dims[0] is None else fz.stack(states),
            *(pairs[0] if dims[1] is None else stacked(pairs)),
        )
        *found, new = torch.vmap(lambda *args: by_verbs(step, *args), in_dims=dims)(*given)
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
    new, _ = torch.vmap(torch.vmap(step))(twice, torch.stack([x, x.flip(0)]), torch.stack([y, y.flip(0)]))
    first, second = map(fz.unstack, fz.unstack(new))
    for found, single in zip((*first, *second[::-1]), (*want, *want), strict=True):
        same_states(found, single)


def test_states_that_are_made_in_a_map() -> None:
    loss, params = of_members("unit")
    step = fz.train_step(loss, fz.adamw(0.1))
    (pairs,) = batches_at(1)
    full = pytree.tree_map(lambda *leaves: torch.stack(leaves), *params)
    new, _ = torch.vmap(lambda p, *inputs: step(step.init(p), *inputs))(full, *stacked(pairs))
    for found, p, pair in zip(fz.unstack(new), params, pairs, strict=True):
        same_states(found, step(step.init(p), *pair)[0])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_derivatives_of_an_ensemble(stage: int) -> None:
    """By what all members share, through an update of each and an evaluation."""
    loss, params = of_members("unit")
    batches = batches_at(2)

    def rank_main(rank: int) -> None:
        def after(lr: torch.Tensor, x: torch.Tensor, maps: bool) -> torch.Tensor:
            step = SHARDS[stage](fz.train_step(loss, fz.adamw(lr)))
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


# ---- members one of whose gradients is not finite


def mean_of(decay: float, step: fz.Step) -> fz.Step:
    """With a moving average of the params, and of a tensor beside."""
    return step.with_state(fz.Extra("mean", "mean_of", copied, functools.partial(averaged, decay)))


def copied(params: fz.Sharded) -> Any:
    return {"params": params.map(lambda p: p), "count": torch.zeros((), dtype=F64)}


def averaged(decay: float, value: Any, params: fz.Sharded, applied: bool) -> Any:
    if not applied:
        return value
    mean = value["params"].map(lambda a, p: decay * a + (1 - decay) * p, params)
    return {"params": mean, "count": value["count"] + 1}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("optimizer", ["momentum", "clipped", "partition"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_member_whose_gradient_is_not_finite_keeps_its_values(stage: int, optimizer: str, scaled: bool) -> None:
    """And shares the counts of the others; where it is none's, nothing changes at all."""
    loss, params = of_members("unit")
    world = 2 if stage else 1
    batches, later = batches_at(world), batches_at(world, seed=50)

    def rank_main(rank: int) -> None:
        step = mean_of(0.5, SHARDS[stage](fz.train_step(loss, OPTIMIZERS[optimizer](0.1))))
        step = fz.loss_scale(step, initial=64.0, interval=1) if scaled else step
        states = [step(step.init(p), *pair)[0] for p, pair in zip(params, batches[rank], strict=True)]
        x, y = stacked(batches[rank])
        if rank == world - 1:  # one rank's input is enough
            x[1, 0, 0] = float("nan")
        new, metrics = torch.vmap(step)(fz.stack(states), x, y)
        assert metrics["skipped"].tolist() == [False, True, False] and new.step == 2
        assert metrics["grad_norm"].isfinite().tolist() == [True, False, True]
        for i, (found, before) in enumerate(zip(fz.unstack(new), states, strict=True)):
            want, _ = step(before, x[i], y[i])
            assert want.step == (1 if i == 1 else 2)
            tensors = [fz.gather([s.params, s.moments, s.extra["mean"]["params"]]) for s in (found, want)]
            assert_trees_close(*tensors, rtol=1e-10)
            assert found.extra["mean"]["count"] == want.extra["mean"]["count"]
            # it goes on with the next batch, by the counts of the others
            after, own = step(found, *later[rank][i])
            assert after.step == 3 and not own["skipped"]
        if scaled:  # by what there was of finite gradients
            assert new.extra["loss_scale"].scale == 256.0

        none, metrics = torch.vmap(step)(fz.stack(states), x * float("nan"), y)
        assert metrics["skipped"].all() and none.step == 1
        for found, before in zip(fz.unstack(none), states, strict=True):
            kept = [fz.gather([s.params, s.moments, s.extra["mean"]["params"]]) for s in (found, before)]
            assert_trees_equal(*kept)
        if scaled:
            assert none.extra["loss_scale"].scale == 64.0

    run_ranks(rank_main, world)


# ---- random numbers


dropped = fz.unit(lambda p, x: torch.nn.functional.dropout(x * p, 0.5))


def noisy(params: Any, x: torch.Tensor) -> torch.Tensor:
    """Homogeneous of degree 2 in each leaf, whatever is dropped: <p, dloss/dp> = 2 loss where both saw the same."""
    h = torch.nn.functional.dropout(x * params["first"], 0.5)
    for p in params["blocks"]:
        h = dropped(p, h)
    return (h * h).sum()


RUNS: dict[str, Callable[[fz.Step], fz.Step]] = {
    "plain": lambda step: step,
    "remat": fz.remat,
    "accumulate": lambda step: fz.accumulate(step, 2),
    "zero1": fz.shard_zero1,
    "zero2, remat": lambda step: fz.remat(fz.shard_zero2(step)),
    "zero3, accumulate": lambda step: fz.accumulate(fz.shard_zero3(step), 2),
    "zero3, remat": lambda step: fz.remat(fz.shard_zero3(step)),
}


@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("name", sorted(RUNS))
def test_dropout(name: str, randomness: str) -> None:
    """Drawn for each member or once for all, the same numbers when a unit runs again, and those of the seed."""
    generator = torch.Generator().manual_seed(0)
    first, *blocks = torch.rand(3, 6, generator=generator, dtype=F64) + 0.5
    params = {"first": first, "blocks": blocks}
    world = 2 if "zero" in name else 1
    xs = torch.randn(world, 40, 6, generator=generator, dtype=F64)

    def rank_main(rank: int) -> None:
        step = RUNS[name](fz.train_step(noisy, fz.sgd(1e-3, momentum=0.9)))
        single = step.init(params, seed=5)
        ensemble = fz.stack([single] * MEMBERS)
        run = torch.vmap(step, in_dims=(0, None), randomness=randomness)
        (new, metrics), (again, second) = [run(ensemble, xs[rank]) for _ in range(2)]
        losses = metrics["loss"]
        assert_trees_equal((again, second), (new, metrics))
        assert len(set(losses.tolist())) == (1 if randomness == "same" else MEMBERS)
        other = run(ensemble.replace(seed=6), xs[rank])[1]["loss"]
        assert not torch.isclose(other, losses).any()
        assert not torch.isclose(run(new, xs[rank])[1]["loss"], losses).any()  # as its step is another one
        if randomness == "same":
            assert_trees_close(losses[0], step(single, xs[rank])[1]["loss"], rtol=1e-10)
        for state, loss in zip(fz.unstack(new), losses, strict=True):
            full = fz.gather(state.params)
            for was, now in zip([first, *blocks], [full["first"], *full["blocks"]], strict=True):
                assert_trees_close((was * (was - now)).sum() / 1e-3, 2 * loss, rtol=1e-8)

    run_ranks(rank_main, world)


def test_random_numbers_need_a_word() -> None:
    step = fz.train_step(noisy, fz.sgd(1e-3))
    state = step.init({"first": torch.ones(3), "blocks": []})
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(step, in_dims=(0, None))(fz.stack([state] * 2), torch.ones(4, 3))


# ---- lower precision, and what cannot be mapped


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_masters_beside_what_is_computed_with(stage: int) -> None:
    """bfloat16 of float32 masters; after the map each member's full copies are those of its slices."""
    loss, params = of_members("unit", dtype=torch.float32)
    world = 2 if stage else 1
    batches = batches_at(world, dtype=torch.float32)

    def rank_main(rank: int) -> None:
        step = fz.train_step(loss, fz.adamw(0.01), fz.Policy(param=torch.float32))
        step = fz.autocast(SHARDS[stage](step))
        states = [step.init(p) for p in params]
        ensemble = fz.stack(states)
        for found, state, pair in zip(fz.unstack(ensemble), states, batches[rank], strict=True):
            assert_trees_equal(step(found, *pair), step(state, *pair))
        for _ in range(3):
            ensemble, metrics = torch.vmap(step)(ensemble, *stacked(batches[rank]))
            runs = [step(state, *pair) for state, pair in zip(states, batches[rank], strict=True)]
            states = [state for state, _ in runs]
            assert_trees_close(metrics["loss"], torch.stack([own["loss"] for _, own in runs]), rtol=3e-2)
        for found, state, pair in zip(fz.unstack(ensemble), states, batches[rank], strict=True):
            # Adam moves a weight by the rate whatever its gradient: 3 updates of 0.01 may differ in sign where it is 0
            assert_trees_close(fz.gather(found.params), fz.gather(state.params), rtol=0, atol=0.061)
            anew = fz.convert(found, step)
            assert_trees_equal(anew.params, found.params)
            new, other = step(found, *pair)[0], step(anew, *pair)[0]
            assert_trees_equal(new, other)
            assert not new.params.stale

    run_ranks(rank_main, world)


REFUSED: dict[str, tuple[Callable[[Any], fz.Step], str]] = {
    "donate": (lambda loss: fz.donate(fz.train_step(loss, fz.sgd(0.1))), r"donates its states.*Leave fz\.donate out"),
    "exact": (lambda loss: fz.train_step(loss, fz.sgd(0.1), fz.Policy.exact()), r"are encoded.*plain dtypes"),
    "8 bits": (
        lambda loss: fz.train_step(loss, fz.adamw(0.1), fz.Policy(moment="8-bit")),
        r"are encoded.*plain dtypes",
    ),
}


@pytest.mark.parametrize("verb", ["step", "forward"])
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_mapped_says_what_to_leave_out(name: str, verb: str) -> None:
    loss, params = of_members("unit", dtype=torch.float32)
    step, message = REFUSED[name][0](loss), REFUSED[name][1]
    (pairs,) = batches_at(1, dtype=torch.float32)
    who = {"step": "step", "forward": r"step\.forward"}[verb]
    call = {"step": step, "forward": step.forward}[verb]
    with pytest.raises(TypeError, match=rf"^{who}: got leaf .* that torch\.func\.vmap transforms, and .*{message}"):
        torch.vmap(call)(fz.stack([step.init(p) for p in params]), *stacked(pairs))


def test_ranks_with_different_numbers_of_members_hang_nobody() -> None:
    loss, params = of_members("unit")
    batches = batches_at(2)

    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(loss, fz.sgd(0.1)))
        states = [step.init(p) for p in params]
        torch.vmap(step)(fz.stack(states[rank:]), *stacked(batches[rank][rank:]))

    with pytest.raises(RankError, match="The ranks have diverged"):
        run_ranks(rank_main, 2, timeout=30)


def test_a_step_has_a_short_name() -> None:
    """torch.vmap asks for it once for every output; the whole table took a tenth of a small ensemble's update."""
    assert fz.train_step(noisy, fz.sgd(1e-3)).__name__ == "noisy" and fz.Step.__name__ == "Step"
