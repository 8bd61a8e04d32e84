"""Every placement, form and order against the plain float64 step."""

from __future__ import annotations

from typing import Any

import pytest
import scenarios
import torch
from exactness import SCENARIOS, SHARDS, check, train
from hypothesis import given
from hypothesis import strategies as st
from nightly import NIGHTLY, in_turns
from reference import adamw_steps

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks, strategies

pytestmark = pytest.mark.usefixtures("hazards")  # races show

UNSHARDED = strategies.transforms(stages=(0,), patterns=scenarios.BLOCKS)
SHARDED = strategies.transforms(stages=(1, 2, 3), patterns=scenarios.BLOCKS)


@given(scenario=st.sampled_from(sorted(SCENARIOS)), chosen=SHARDED, world=st.integers(1, 4))
def test_drawn_transforms_on_threads(scenario: str, chosen: Any, world: int) -> None:
    check(scenario, chosen, world)


@given(scenario=st.sampled_from(sorted(SCENARIOS)), chosen=UNSHARDED)
def test_drawn_transforms_unsharded(scenario: str, chosen: Any) -> None:
    check(scenario, chosen, 1)


def _zero1(step: fz.Step) -> fz.Step:
    return fz.accumulate(fz.shard_zero1(step), 2)


def _zero2(step: fz.Step) -> fz.Step:
    return fz.donate(fz.accumulate(fz.shard_zero2(step), 2))


def _zero3(step: fz.Step) -> fz.Step:
    return fz.donate(fz.accumulate(fz.shard_zero3(step), 2))


def _zero3_remat(step: fz.Step) -> fz.Step:
    return fz.remat(fz.loss_scale(fz.accumulate(fz.shard_zero3(step), 2), 8.0))


ALL = [(transform, world) for transform in (_zero1, _zero2, _zero3, _zero3_remat) for world in (3, 2, 1)]


@in_turns(7)
@pytest.mark.parametrize(("transform", "world"), ALL if NIGHTLY else [*ALL[::3], ALL[1], ALL[7], ALL[11]])
def test_on_gloo_processes(transform: Any, world: int) -> None:
    for scenario in SCENARIOS:
        check(scenario, [(transform.__name__, transform)], world, backend="processes")


@given(data=st.data(), chosen=SHARDED, world=st.integers(1, 3))
def test_every_order_gives_the_same_bits(data: Any, chosen: Any, world: int) -> None:
    other = data.draw(st.permutations(chosen))

    def both(rank: int) -> None:
        first = train(rank, "module", chosen, world, steps=2)
        second = train(rank, "module", other, world, steps=2)
        assert_trees_equal(first[0], second[0])
        assert first[1:] == second[1:]

    run_ranks(both, world)
    step = fz.train_step(lambda p: p, fz.sgd(0.1))
    a, b = strategies.apply(step, chosen), strategies.apply(step, other)
    assert a.signature == b.signature and str(a) == str(b)


@given(chosen=SHARDED, world=st.integers(2, 4))
def test_frozen_leaves_stay_and_the_rest_is_exact(chosen: Any, world: int) -> None:
    pattern = "blocks.1.*|embed*"
    loss, params = scenarios.tiny_lm()
    names = list(params)
    frozen = {i for i, name in enumerate(names) if name.startswith(("blocks.1.", "embed"))}
    want, _, _ = adamw_steps(loss, params, scenarios.token_batches(world), 3, frozen=lambda i: i in frozen)

    def rank_main(rank: int) -> Any:
        loss, params = scenarios.tiny_lm()
        step = fz.freeze(strategies.apply(fz.train_step(loss, fz.adamw(1e-2)), chosen), pattern)
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, *scenarios.token_batches(world)[rank])
        moments = fz.gather(state.moments)
        assert moments.mu["embed.weight"] is None and moments.mu["unused"] is not None
        return fz.gather(state.params)

    for got in run_ranks(rank_main, world):
        assert_trees_close(got, want, rtol=1e-10)
        assert all(torch.equal(got[names[i]], params[names[i]]) for i in frozen)


@in_turns(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_torch_optim_in_float32(stage: int) -> None:
    """Losses within 1e-6 of torch.optim.AdamW with torch's own clipping factor, over 20 steps."""
    module = scenarios.TinyLM(dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(0.4 * torch.randn(param.shape, generator=generator))
    apply, params = fz.functional(module)
    batches = scenarios.token_batches(2)

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def rank_main(rank: int) -> list[float]:
        step = SHARDS[stage](fz.train_step(lambda p, x, y: loss_of(apply(p, x), y), fz.adamw(1e-2, weight_decay=0.1)))
        state, losses = step.init(params), []
        batch = batches[rank] if stage else tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
        for _ in range(20):
            state, metrics = step(state, *batch)
            losses.append(metrics["loss"].item())
        return losses

    got = run_ranks(rank_main, 2 if stage else 1)[0]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    for value in got:
        optimizer.zero_grad()
        loss = loss_of(module(x), y)
        loss.backward()
        optimizer.step()
        assert value == pytest.approx(loss.item(), rel=1e-6)
