"""fz.ema: the average that one computes by hand of the gathered params, with any other transform around it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import scenarios
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_day
from torch.utils import _pytree as pytree

import fzero as fz
from fzero.state.sharded import is_sharded
from fzero.testing import LiveBytes, assert_trees_close, assert_trees_equal, run_ranks, strategies

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
POLICIES = {"float64": (F64, None), "exact": (F32, fz.Policy.exact()), "compact16": (F32, fz.Policy.compact16())}


def mapped(fn: Any, *trees: Any) -> Any:
    return pytree.tree_map(fn, *trees)


@pytest.mark.usefixtures("hazards")
@by_day(6)
@given(
    data=st.data(),
    chosen=strategies.transforms(stages=(0, 1, 2, 3), patterns=scenarios.BLOCKS),
    world=st.integers(1, 3),
    decays=st.dictionaries(
        st.sampled_from(["ema", "fast", "a.b"]), st.sampled_from([0.0, 0.5, 0.9]), min_size=1, max_size=3
    ),
    policy=st.sampled_from([*POLICIES]),
    frozen=st.booleans(),
    away=st.booleans(),
)
def test_is_the_average_of_the_gathered_params(
    data: Any, chosen: Any, world: int, decays: dict[str, float], policy: str, frozen: bool, away: bool
) -> None:
    dtype, scheme = POLICIES[policy]
    chosen = chosen if dtype == F64 else [pair for pair in chosen if pair[0] != "autocast"]
    stacked, params = scenarios.stack(dtype=dtype)

    def loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        like = p["head"]["w"].dtype
        return stacked(p, x.to(like), y.to(like)).to(dtype)

    others = [*chosen]
    for name, decay in decays.items():
        own: Any = {} if name == "ema" else {"name": name}
        others.insert(data.draw(st.integers(0, len(others))), (name, functools.partial(fz.ema, decay=decay, **own)))
    step = strategies.apply(fz.train_step(loss, fz.adamw(1e-2), scheme), others)
    step = fz.freeze(step, "blocks.0.*") if frozen else step
    step = fz.offload(step, moments="host") if away else step

    def wide(tree: Any) -> Any:
        return mapped(lambda x: x.to(dtype), tree)

    world = world if any(name.startswith("shard") for name, _ in chosen) else 1

    def rank_main(rank: int) -> None:
        batch = scenarios.vector_batches(world, dtype=dtype)[rank]
        state = step.init(params)
        want = dict.fromkeys(decays, wide(fz.gather(state.params)))
        for _ in range(3):
            state, _ = step(state, *batch)
            now = wide(fz.gather(state.params))
            for name, decay in decays.items():
                want[name] = mapped(lambda a, p, decay=decay: decay * a + (1 - decay) * p, want[name], now)
        for name in decays:
            check(state, batch, name, want[name])

    def check(state: fz.TrainState, batch: Any, name: str, want: Any) -> None:
        average = state.extra[name]
        trained = [row.path for row in state.layout.rows if not row.frozen]
        assert is_sharded(average) and [*average] == trained
        assert {x.dtype for x in average.values()} == {dtype} and (not away or average.away)
        in_place = state.replace(params=average)
        assert_trees_close(wide(fz.gather(in_place.params)), want, rtol=1e-12 if dtype == F64 else 1e-6)
        found = step.forward(in_place, *batch)
        assert_trees_close(found, step.forward(step.init(want), *batch), rtol=1e-10 if dtype == F64 else 2e-2)

    run_ranks(rank_main, world)


def test_a_second_average_is_a_thing_of_its_own(tmp_path: Path) -> None:
    params, bare = {"w": torch.arange(5.0), "b": torch.ones(3)}, fz.train_step(losses, fz.adamw(0.1))
    slow, fast = functools.partial(fz.ema, decay=0.9), functools.partial(fz.ema, decay=0.5, name="fast")

    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(fast(slow(bare)))
        state, _ = step(step.init(params), torch.ones(5))
        fz.save(tmp_path / "it", state)
        again = fz.load(tmp_path / "it", fz.shard_zero1(slow(fast(bare))))
        for name in ("ema", "fast"):
            assert_trees_equal(fz.gather(again.extra[name]), fz.gather(state.extra[name]))
        with pytest.raises(ValueError, match=r"keeps state.extra\['fast'\] of an ema, which the step does not"):
            fz.load(tmp_path / "it", fz.shard_zero3(slow(bare)))
        more = fz.convert(state, fz.shard_zero3(fz.ema(step, 0.0, name="more")))
        assert_trees_equal(fz.gather(more.extra["more"]), fz.gather(state.params))
        assert_trees_equal(fz.gather(more.extra["fast"]), fz.gather(state.extra["fast"]))

    run_ranks(rank_main, 2)
    assert len(fast(fast(bare)).extras) == 1
    with pytest.raises(
        ValueError, match=r"ema\(0.9, name='fast'\): this step already keeps state.extra\['fast'\], by ema"
    ):
        fz.ema(fast(bare), 0.9, name="fast")
    with pytest.raises(ValueError, match=r"name 'loss' for an entry of state.extra, which is that of a metric"):
        fz.ema(bare, 0.9, name="loss")


def losses(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (p["w"] * x).sum() + p["b"].sum()


def test_stays_where_an_update_is_skipped_and_is_planned() -> None:
    step = fz.ema(fz.train_step(losses, fz.sgd(0.1)), 0.5)
    params = {"w": torch.arange(5.0), "b": torch.ones(3)}
    state, metrics = step(step.init(params), torch.full((5,), float("inf")))
    assert metrics["skipped"]
    assert_trees_equal(fz.gather(state.extra["ema"]), params)
    held = sum(x.nbytes for x in state.extra["ema"].entries.values())
    assert fz.plan(step, params).extra == held
    assert fz.plan(fz.offload(step, moments="host"), params).extra == held


@pytest.mark.parametrize("policy", ["float64", "exact", "compact16"])
@pytest.mark.parametrize("donate", [False, True])
def test_is_written_in_place_where_the_state_is_donated(policy: str, donate: bool) -> None:
    """To the bit what the formula says; where it is not donated, the old average stays."""
    dtype, own = POLICIES[policy]
    params = {"w": torch.randn(300_000, generator=torch.Generator().manual_seed(0), dtype=dtype), "b": torch.ones(3)}
    step = fz.ema(fz.train_step(losses, fz.adamw(0.1), own), 0.9)
    step = fz.donate(step) if donate else step
    x = torch.linspace(-1, 1, 300_000, dtype=dtype if policy != "compact16" else BF16)
    state, _ = step(step.init(params), x)
    old = state.extra["ema"]
    assert is_sharded(old)
    before, places = mapped(torch.clone, fz.gather(old)), {x.data_ptr() for x in old.buffers.values()}
    del old
    new, _ = step(state, x)
    after = fz.gather(new.params)
    want = mapped(lambda a, p: 0.9 * a + (1 - 0.9) * p.to(a.dtype), before, after)
    assert_trees_equal(fz.gather(new.extra["ema"]), want)
    assert is_sharded(new.extra["ema"])
    assert ({x.data_ptr() for x in new.extra["ema"].buffers.values()} == places) == donate
    if not donate:
        assert_trees_equal(fz.gather(state.extra["ema"]), before)


@pytest.mark.parametrize("policy", [fz.Policy(), fz.Policy.bf16_states(), fz.Policy.compact16()])
def test_takes_no_more_than_the_average(policy: fz.Policy) -> None:
    params = {"w": torch.ones(300_000)}

    def peak(step: fz.Step) -> int:
        step, x = fz.donate(step), torch.ones(300_000, dtype=policy.compute or F32)
        with LiveBytes() as live:
            state, _ = step(step.init(params), x)
            live.reset_peak()
            step(state, x)
        return live.peak

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (p["w"] * x).sum()

    bare = fz.train_step(fn, fz.adamw(0.1), policy)
    assert peak(fz.ema(bare, 0.9)) <= peak(bare) + 4 * 300_000 + (1 << 18)  # and what a chunk takes


def test_an_error_in_one_that_is_written_says_whose_it_is() -> None:
    def fused(value: Any, params: Any) -> None:
        raise ArithmeticError("no")

    def begun(params: Any) -> Any:
        return params.map(torch.clone)

    extra = fz.Extra("mine", "mine()", begun, lambda value, params, applied: value, fused=fused)
    step = fz.train_step(losses, fz.sgd(0.1)).with_state(extra)
    state = step.init({"w": torch.arange(5.0), "b": torch.ones(3)})
    with pytest.raises(ArithmeticError, match="no") as found:
        step(state, torch.ones(5))
    assert any("state.extra['mine'], by mine()" in note for note in found.value.__notes__)
    assert_trees_equal(fz.gather(state.extra["mine"]), {"w": torch.arange(5.0), "b": torch.ones(3)})
    bad = fz.Extra("mine", "mine()", lambda params: 0, lambda value, params, applied: value, fused=fused)
    with pytest.raises(TypeError, match=r"\['mine'\] \(mine\(\)\): got int, expected a Sharded of all leaves"):
        fz.train_step(losses, fz.sgd(0.1)).with_state(bad).init({"w": torch.arange(5.0), "b": torch.ones(3)})


@pytest.mark.parametrize("decay", [1.0, -0.1])
def test_other_decays_are_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"ema: got decay=.*, expected a number in \[0, 1\)"):
        fz.ema(fz.train_step(losses, fz.sgd(0.1)), decay)
