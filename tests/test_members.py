"""Members of an ensemble apart: gradients that are not finite, random numbers, lower precision; what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ensembles import F64, MEMBERS, OPTIMIZERS, SHARDS, batches_at, of_members, stacked
from nightly import by_turns, in_turns

import fzero as fz
from fzero.testing import RankError, assert_trees_close, assert_trees_equal, run_ranks

pytestmark = pytest.mark.usefixtures("hazards")  # races show


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


@in_turns(8)
@pytest.mark.parametrize(
    ("stage", "optimizer", "scaled"), by_turns(range(4), ["momentum", "clipped", "partition"], [False, True], of=3)
)
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


@in_turns(4)
@pytest.mark.parametrize(("name", "randomness"), by_turns(sorted(RUNS), ["same", "different"]))
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


@in_turns(4)
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
    "exact": (lambda loss: fz.train_step(loss, fz.sgd(0.1), fz.Policy.exact()), r"are encoded.*states are floats"),
    "8 bits": (
        lambda loss: fz.train_step(loss, fz.adamw(0.1), fz.Policy(moment="8-bit")),
        r"are encoded.*states are floats",
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
    with pytest.raises(TypeError, match=rf"^{who}: got state .* that torch\.func\.vmap transforms, and .*{message}"):
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
