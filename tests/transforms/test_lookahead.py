"""fz.lookahead: slow and fast weights as one computes them by hand, with any other transform around it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import scenarios
import torch
import whole_runs
from hypothesis import given
from hypothesis import strategies as st
from nightly import NIGHTLY, by_day, by_turns, in_turns
from torch.utils import _pytree as pytree

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks, strategies

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
EVERY, ALPHA = 2, 0.3
SHARDS = {0: lambda step: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}
LOOKAHEAD = functools.partial(fz.lookahead, every=EVERY, alpha=ALPHA)


def mapped(fn: Any, *trees: Any) -> Any:
    return pytree.tree_map(fn, *trees)


def by_hand(loss: Any, params: Any, batches: Any, steps: int, trained: Any) -> tuple[Any, Any, Any]:
    """AdamW with lookahead and an average, written with torch alone: params, slow weights, the average."""
    fast, moments = params, (mapped(torch.zeros_like, params),) * 2
    slow = average = params
    for count in range(1, steps + 1):

        def mean(p: Any) -> torch.Tensor:
            return torch.stack([loss(p, *batch) for batch in batches]).mean()

        new, moments = whole_runs.plain_adamw(fast, torch.func.grad(mean)(fast), moments, count, 0.05, 0.1, None)
        fast = mapped(lambda keep, p, n: n if keep else p, trained, fast, new)
        if count % EVERY == 0:
            slow = mapped(lambda s, p: s + ALPHA * (p - s), slow, fast)
            fast = slow
        average = mapped(lambda a, p: 0.5 * a + 0.5 * p, average, fast)
    return fast, slow, average


@pytest.mark.usefixtures("hazards")
@by_day(6)
@given(
    data=st.data(),
    chosen=strategies.transforms(stages=(0, 1, 2, 3), patterns=scenarios.BLOCKS),
    world=st.integers(1, 4),
    frozen=st.booleans(),
)
def test_is_what_one_computes_by_hand(data: Any, chosen: Any, world: int, frozen: bool) -> None:
    loss, params = scenarios.stack()
    places = [data.draw(st.integers(0, len(chosen))) for _ in range(2)]
    others = list(chosen)
    for place, own in zip(places, (("ema", lambda step: fz.ema(step, 0.5)), ("it", LOOKAHEAD)), strict=True):
        others.insert(place, own)
    step = strategies.apply(fz.train_step(loss, whole_runs.adamw(0.05, 0.1)), others)
    step = fz.freeze(step, "blocks.0.*") if frozen else step
    world = world if any(name.startswith("shard") for name, _ in chosen) else 1
    batches = scenarios.vector_batches(world)
    trained = mapped(lambda x: True, params)
    trained["blocks"][0] = mapped(lambda x: not frozen, params["blocks"][0])
    want = by_hand(loss, params, batches, 5, trained)

    def rank_main(rank: int) -> None:
        state = step.init(params)
        for _ in range(5):
            state, _ = step(state, *batches[rank])
        trees = (state.params, *[state.replace(params=state.extra[name]).params for name in ("lookahead", "ema")])
        for got, expected in zip(trees, want, strict=True):
            assert_trees_close(fz.gather(got), expected, rtol=1e-10)

    run_ranks(rank_main, world)


# ---- derivatives of whole runs


def objective_by_hand(loss: Any, batches: Any, p: Any, lr: torch.Tensor) -> torch.Tensor:
    moved, slow = mapped(torch.zeros_like, p), p
    for count in range(1, 4):
        grads = torch.func.grad(lambda p: torch.stack([loss(p, *batch) for batch in batches]).mean())(p)
        moved = mapped(lambda b, g: 0.8 * b + g, moved, grads)
        p = mapped(lambda p, b: p - lr * b, p, moved)
        if count % EVERY == 0:
            p = slow = mapped(lambda s, p: s + ALPHA * (p - s), slow, p)
    return whole_runs.cubes(p) + whole_runs.cubes(slow)


def objective(loss: Any, batch: Any, transform: Any, p: Any, lr: torch.Tensor) -> torch.Tensor:
    step = transform(fz.train_step(loss, fz.sgd(lr, momentum=0.8)))
    state = step.init(p)
    for _ in range(3):
        state, _ = step(state, *batch)
    slow = state.replace(params=state.extra["lookahead"]).params
    return whole_runs.cubes(fz.gather(state.params)) + whole_runs.cubes(fz.gather(slow))


@in_turns(9)
@pytest.mark.parametrize(("name", "on"), by_turns(whole_runs.TRANSFORMS, [(0, 1), (1, 2), (3, 3)]))
def test_transforms_go_on_through_it(name: str, on: tuple[int, int]) -> None:
    stage, world = on
    loss, params = scenarios.stack(blocks=2, width=3)
    batches, args = scenarios.vector_batches(world, width=3), (params, *whole_runs.NUMBERS)
    want = whole_runs.TRANSFORMS[name](lambda p, lr, *_: objective_by_hand(loss, batches, p, lr), args)

    def rank_main(rank: int) -> Any:
        others = lambda step: SHARDS[stage](fz.fuse_update(LOOKAHEAD(step)))
        return whole_runs.TRANSFORMS[name](lambda p, lr, *_: objective(loss, batches[rank], others, p, lr), args)

    whole_runs.assert_found(run_ranks(rank_main, world), want, name)


# ---- states in few bits, in other memories


LOW: dict[str, Any] = {
    "exact": fz.Policy.exact(),
    "compact24": fz.Policy.compact24(),
    "compact16": fz.Policy.compact16(),
    "nearest": fz.Policy.bf16_states(),
}


def encoded(rank: int, policy: str, transform: Any, steps: int) -> list[Any]:
    """The params before and after, the slow weights, of each update."""
    stacked, params = scenarios.stack(dtype=F32)
    batch = scenarios.vector_batches(1, dtype=F32)[0]

    def loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        like = p["head"]["w"].dtype
        return stacked(p, x.to(like), y.to(like)).float()

    optimizer = fz.chain(fz.clip_by_global_norm(0.5), fz.gradient_noise(1e-3), fz.adamw(1e-2))
    step = transform(fz.train_step(loss, optimizer, LOW[policy]))
    state, out = step.init(params), []
    for _ in range(steps):
        state, _ = step(state, *batch)
        slow = state.extra.get("lookahead")
        parts = {} if slow is None else {path: slow[path].dtype for path in slow}
        assert set(parts.values()) <= {F32}
        whole = None if slow is None else fz.gather(state.replace(params=slow).params)
        out.append((fz.gather(state.params), whole))
    return out


@in_turns(4)
@pytest.mark.usefixtures("hazards")
@pytest.mark.parametrize("policy", LOW)
def test_slow_weights_are_wide_and_params_are_rounded_from_them(policy: str, tmp_path: Path) -> None:
    _, start = scenarios.stack(dtype=F32)
    plain = encoded(0, policy, lambda step: step, EVERY)[-1][0]
    first, found = encoded(0, policy, LOOKAHEAD, 2 * EVERY)[EVERY - 1 :: EVERY]
    begun = fz.gather(fz.train_step(lambda p: p["head"]["w"].sum(), fz.sgd(0.1), LOW[policy]).init(start).params)
    slow = mapped(lambda s, p: s.float() + ALPHA * (p.float() - s.float()), begun, plain)
    assert_trees_equal(first[1], slow)
    bits = {"exact": 2.0**-23, "compact24": 2.0**-15}.get(policy, 2.0**-7)
    assert_trees_close(mapped(torch.Tensor.float, first[0]), slow, rtol=bits, atol=1e-30)
    disk = fz.Disk(tmp_path)
    ways = [
        (1, lambda step: fz.fuse_update(LOOKAHEAD(step))),
        (1, lambda step: fz.donate(LOOKAHEAD(fz.fuse_update(step, norm="held")))),
        (1, lambda step: fz.offload(fz.donate(LOOKAHEAD(step)), params="host", moments="host")),
        (1, lambda step: LOOKAHEAD(fz.offload(fz.fuse_update(step), params=disk, grads=disk, moments=disk))),
        *[(2, lambda step, stage=stage: SHARDS[stage](LOOKAHEAD(step))) for stage in (1, 2, 3)],
        (4, lambda step: fz.donate(fz.fuse_update(fz.shard_zero2(LOOKAHEAD(step))))),
        (2, lambda step: LOOKAHEAD(fz.offload(fz.shard_zero1(step), params="host", moments="host"))),
    ]
    for world, transform in ways if NIGHTLY else ways[len(policy) % 2 :: 2]:
        for each in run_ranks(functools.partial(encoded, policy=policy, transform=transform, steps=2 * EVERY), world):
            assert_trees_equal(each[-1], found)


def on_processes(rank: int) -> Any:
    return encoded(rank, "compact16", lambda step: fz.fuse_update(fz.shard_zero1(LOOKAHEAD(step))), 2 * EVERY)[-1]


def test_on_processes() -> None:
    want = encoded(0, "compact16", LOOKAHEAD, 2 * EVERY)[-1]
    with fz.testing.hazards():
        for found in run_ranks(on_processes, 2, backend="processes"):
            assert_trees_equal(found, want)


# ---- a life


def losses(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (p["w"] * x).sum() + (p["b"] ** 2).sum()


PARAMS = {"w": torch.arange(5.0), "b": torch.ones(3)}


def test_what_is_skipped_counts_as_none_and_old_states_stay() -> None:
    step = LOOKAHEAD(fz.train_step(losses, fz.sgd(1.0)))
    good, bad = torch.ones(5), torch.full((5,), float("inf"))
    states = [step.init(PARAMS)]
    for x in (good, bad, bad, good):
        states.append(step(states[-1], x)[0])
    assert [state.step for state in states] == [0, 1, 1, 1, 2]
    for state, moved in zip(states, (0.0, 1.0, 1.0, 1.0, 2 * ALPHA), strict=True):
        assert_trees_close(fz.gather(state.params)["w"], PARAMS["w"] - moved, rtol=1e-6)
    slow = [fz.gather(state.extra["lookahead"])["w"] for state in states]
    assert_trees_equal(slow[:4], [PARAMS["w"]] * 4)
    assert_trees_equal(slow[4], fz.gather(states[4].params)["w"])


def test_members_that_skip_an_update_keep_their_values() -> None:
    step = LOOKAHEAD(fz.train_step(losses, fz.sgd(1.0)))
    state = step(step.init(PARAMS), torch.ones(5))[0]
    x = torch.stack([torch.ones(5), torch.full((5,), float("inf"))])
    both, _ = torch.vmap(step)(fz.stack([state, state]), x)
    one, other = fz.unstack(both)
    assert_trees_equal(fz.gather(one.params), fz.gather(step(state, torch.ones(5))[0].params))
    assert_trees_equal(fz.gather(other.params), fz.gather(state.params))
    assert_trees_equal(fz.gather(other.extra["lookahead"]), PARAMS)


def test_is_saved_loaded_and_converted_like_moments(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(LOOKAHEAD(fz.train_step(losses, fz.adamw(0.1))))
        state, _ = step(step.init(PARAMS), torch.ones(5))
        fz.save(tmp_path / "it", state)
        want = step(state, torch.ones(5))[0]
        away = fz.offload(fz.shard_zero1(LOOKAHEAD(fz.train_step(losses, fz.adamw(0.1)))), moments="host")
        for own, again in (
            (step, fz.load(tmp_path / "it", step)),
            (away, fz.load(tmp_path / "it", away)),
            (away, fz.convert(state, away)),
        ):
            assert again.extra["lookahead"].away == (own is away)
            assert_trees_equal(fz.gather(again.extra["lookahead"]), PARAMS)
            new = own(again, torch.ones(5))[0]
            assert_trees_equal(fz.gather(new.params), fz.gather(want.params))
            assert_trees_equal(fz.gather(new.extra["lookahead"]), fz.gather(want.params))

    run_ranks(rank_main, 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [({"every": 0}, "every=0, expected at least 1"), ({"alpha": 1.1}, r"alpha=1.1, expected a number in \[0, 1\]")],
)
def test_other_numbers_are_refused(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"lookahead: got {said}"):
        fz.lookahead(fz.train_step(losses, fz.sgd(0.1)), **given)


def kept(value: Any, params: Any, applied: bool) -> Any:
    return value


@pytest.mark.parametrize(
    ("init", "changes", "error", "said"),
    [
        (lambda p: torch.ones(()), kept, TypeError, "expected a Sharded of all leaves that are trained"),
        (lambda p: p.map(torch.clone), lambda value, p: p, TypeError, "expected a pair"),
        (lambda p: p.map(torch.clone), lambda value, p: (value, 1.0), TypeError, "expected a Sharded of the groups"),
        (lambda p: p.map(torch.clone), lambda v, p: (v, p.map(lambda x: x[:1])), ValueError, "as many elements"),
    ],
)
def test_changes_of_ones_own_are_held_to_what_they_are_given(init: Any, changes: Any, error: Any, said: str) -> None:
    extra = fz.Extra("own", "own()", init, kept, changes=changes)
    step = fz.train_step(losses, fz.sgd(0.1)).with_state(extra)
    with pytest.raises(error, match=said):
        step(step.init(PARAMS), torch.ones(5))
