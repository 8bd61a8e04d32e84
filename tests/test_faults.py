"""An error that all ranks raise and catch, a little apart in time, leaves the step and the old state usable on each."""

from __future__ import annotations

import functools
import time
from typing import Any
from unittest import mock

import pytest
import scenarios
import torch
from exactness import SHARDS
from nightly import by_turns, in_turns

import fzero as fz
from fzero.table import layout
from fzero.testing import assert_trees_close, run_ranks
from fzero.update import fused as fused_update

pytestmark = pytest.mark.usefixtures("hazards")


_, PARAMS = scenarios.stack(blocks=4)
block = fz.unit(lambda q, x: torch.tanh(x @ q["w"] + q["b"]))


def loss(p: Any, x: torch.Tensor, y: torch.Tensor, after: Any = lambda number, x: x) -> torch.Tensor:
    """That of scenarios.stack; `after` is called behind each block."""
    for number, q in enumerate(p["blocks"]):
        x = after(number, block(q, x))
    return ((x @ p["head"]["w"] + p["head"]["b"] - y) ** 2).mean()


def build(lr: Any, stage: int, fused: bool) -> fz.Step:
    step = SHARDS[stage](fz.train_step(loss, fz.sgd(lr)))
    return fz.fuse_update(step) if fused else step


def goes_on(rank: int, good: fz.Step, state: fz.TrainState) -> None:
    """As one process does, over all examples."""
    plain = fz.train_step(scenarios.stack(blocks=4)[0], fz.sgd(0.1))
    batches = [torch.cat(parts) for parts in zip(*scenarios.vector_batches(2), strict=True)]
    want = fz.gather(plain(plain.init(PARAMS), *batches)[0].params)
    for _ in range(2):
        moved, metrics = good(state, *scenarios.vector_batches(2)[rank])
        assert torch.isfinite(metrics["loss"])
        assert_trees_close(fz.gather(moved.params), want, rtol=1e-10)


def raises_in_the_update(rank: int, stage: int, fused: bool, at: int) -> None:
    asked = 0

    def lr(count: int) -> float:
        nonlocal asked
        asked += 1
        if asked >= at:
            time.sleep(0.2 * rank)
            raise KeyError("the user's own")
        return 0.1

    good = build(0.1, stage, fused)
    state = good.init(PARAMS)
    bad = build(lr, stage, fused)
    for _ in range(2):
        asked = 0
        with (
            mock.patch.object(layout, "SMALL", 0),  # as large ones
            mock.patch.object(fused_update, "SMALL", 0),
            pytest.raises(KeyError, match="the user's own"),
        ):
            bad(state, *scenarios.vector_batches(2)[rank])
    goes_on(rank, good, state)


@in_turns(4)
@pytest.mark.parametrize(("stage", "fused", "at"), by_turns([1, 2, 3], [False, True], [1, 3]))
def test_a_schedule_that_raises_at_a_later_group(stage: int, fused: bool, at: int) -> None:
    if not fused and stage == 3:
        at = 1  # all groups are updated at once
    run_ranks(functools.partial(raises_in_the_update, stage=stage, fused=fused, at=at), 2, backend="processes")


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, rank: int) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.rank = inputs[1]

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        time.sleep(0.2 * ctx.rank)
        raise KeyError("the user's own")


def raises_in_the_pullback(rank: int, stage: int, fused: bool, remat: bool) -> None:
    def fails(number: int, x: Any) -> Any:
        return _Fails.apply(x, rank) if number == 1 else x

    good = build(0.1, stage, fused)
    good = fz.remat(good) if remat else good
    state = good.init(PARAMS)
    for _ in range(2):
        with pytest.raises(KeyError, match="the user's own"):
            good(state, *scenarios.vector_batches(2)[rank], fails)
    goes_on(rank, good, state)


@in_turns(4)
@pytest.mark.parametrize(("stage", "fused", "remat"), by_turns([1, 2, 3], [False, True], [False, True]))
def test_a_pullback_that_raises(stage: int, fused: bool, remat: bool) -> None:
    run = functools.partial(raises_in_the_pullback, stage=stage, fused=fused, remat=remat)
    run_ranks(run, 2, backend="processes")


def raises_in_the_forward(rank: int) -> None:
    good = build(0.1, 3, False)
    state = good.init(PARAMS)
    goes_on(rank, good, state)
    for at in (0, 2):

        def fails(number: int, x: torch.Tensor, at: int = at) -> torch.Tensor:
            if number == at:
                time.sleep(0.2 * rank)
                raise KeyError("the user's own")
            return x

        with pytest.raises(KeyError, match="the user's own"):
            good(state, *scenarios.vector_batches(2)[rank], fails)
    goes_on(rank, good, state)


def test_a_forward_that_raises_with_a_gather_on_its_way() -> None:
    run_ranks(raises_in_the_forward, 2, backend="processes")


def fewer_units_than_last_time(rank: int) -> None:
    """What was gathered ahead in 8 bits is decoded when it is given up."""

    def fn(p: Any, x: torch.Tensor, count: int) -> torch.Tensor:
        for q in p["blocks"][:count]:
            x = block(q, x)
        return x.square().mean()

    step = fz.shard_zero3(fz.train_step(fn, fz.sgd(0.1), fz.Policy(gather="8-bit")))
    state, x = step.init(PARAMS), scenarios.vector_batches(2)[rank][0]
    alone = {count: step.vjp(state, x, count)[0] for count in (4, 2, 3)}
    for count in (4, 2, 4, 3, 2):
        out, pullback = step.vjp(state, x, count)
        assert torch.equal(out, alone[count])
        pullback(torch.ones_like(out))


@in_turns(2)
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_8_bit_gathers_with_fewer_units_than_last_time(backend: str) -> None:
    run_ranks(fewer_units_than_last_time, 2, backend=backend)
    with fz.testing.hazards(None):
        run_ranks(fewer_units_than_last_time, 2, backend=backend)
