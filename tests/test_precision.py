"""Dtype policies and autocast: what is stored, what is computed, what is reduced."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import scenarios
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st
from nightly import in_turns

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, recorded_collectives, run_ranks, strategies

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}


def float32_stack(seed: int = 0) -> Any:
    return scenarios.stack(seed, dtype=F32)


@given(
    first=strategies.policies(),
    second=strategies.policies(),
    stage=st.sampled_from([0, 1, 2, 3]),
    remat=st.booleans(),
    donated=st.booleans(),
)
def test_every_mix_of_dtypes_trains(first: Any, second: Any, stage: int, remat: bool, donated: bool) -> None:
    """Mixed within one unit; states have the table's dtypes, and the update is near the float64 one."""
    _loss, params = float32_stack()
    world = 2 if stage else 1
    batches = scenarios.vector_batches(world, dtype=F32)
    half = fz.Policy.by_path({"*.w": first, "*.b": second})

    def loose(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            x = block(q, x)
        return ((x @ p["head"]["w"].float() + p["head"]["b"].float() - y) ** 2).mean()

    block = fz.unit(lambda q, x: torch.tanh(x @ q["w"].float() + q["b"].float()))
    exact, _ = scenarios.stack()
    wide = pytree.tree_map(lambda leaf: leaf.double(), params)
    inputs = [tuple(part.double() for part in batch) for batch in batches]
    plain = fz.train_step(exact, fz.sgd(0.05))
    state, _ = plain(plain.init(wide), *[torch.cat(parts) for parts in zip(*inputs, strict=True)])
    want = fz.gather(state.params)

    def rank_main(rank: int) -> None:
        step = SHARDS[stage](fz.train_step(loose, fz.chain(fz.sgd(0.05, momentum=0.9)), half))
        step = fz.remat(step) if remat else step
        step = fz.donate(step) if donated else step
        state, _ = step(step.init(params), *batches[rank])
        rows = {row.path: row.policy for row in state.layout.rows}
        for path, policy in rows.items():
            assert state.params[path].dtype == (
                policy.param if stage in (0, 3) or policy.param != policy.compute else policy.compute
            )
            assert state.moments[-1].momentum[path].dtype == policy.moment
        _, pullback = step.vjp(state, *batches[rank])
        grads, _ = pullback(torch.ones(()))
        assert all(grads[path].dtype == policy.grad for path, policy in rows.items())
        assert_trees_close(pytree.tree_map(lambda t: t.double(), fz.gather(state.params)), want, rtol=0.1, atol=0.1)

    run_ranks(rank_main, world)


def test_autocast_casts_matrices_before_the_gather() -> None:
    """Half the bytes for the matrices."""
    loss, params = scenarios.tiny_lm(dtype=F32)
    batches = scenarios.token_batches(2)

    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(fz.autocast(fz.train_step(loss, fz.adamw(1e-3)), BF16))
        with recorded_collectives() as record:
            state = step.init(params)
            state, metrics = step(state, *batches[rank])
        rows = {row.path: row.policy for row in state.layout.rows}
        assert rows["blocks.0.up.weight"].compute == BF16 and rows["blocks.0.up.bias"].compute == F32
        assert all(policy.param == policy.grad == policy.moment == policy.reduce == F32 for policy in rows.values())
        groups = state.layout.groups
        for operation, tag, size in record:
            if operation == "all_gather" and tag in groups:
                assert size == state.layout.shard_numel(tag) * groups[tag].row.policy.compute.itemsize  # type: ignore[union-attr]
        assert torch.isfinite(metrics["loss"])

    run_ranks(rank_main, 2)


def test_an_explicit_policy_beats_autocast_in_any_order() -> None:
    loss, params = scenarios.tiny_lm(dtype=F32)
    policy = fz.Policy.by_path({"head*|embed*": fz.Policy(compute=F32), "*": fz.Policy()})
    plan = fz.plan(fz.autocast(fz.train_step(loss, fz.sgd(0.1), policy), F16), params)
    rows = {row.path: row.policy.compute for row in plan.rows}
    assert rows["embed.weight"] == F32 and rows["blocks.1.down.weight"] == F16 and rows["blocks.1.down.bias"] == F32


@given(
    scale=st.sampled_from([1.0, 2.0, 1024.0, "dynamic"]),
    stage=st.sampled_from([0, 1, 2, 3]),
    count=st.sampled_from([1, 2]),
)
def test_the_loss_scale_is_never_seen(scale: Any, stage: int, count: int) -> None:
    """Outputs, metrics, gathered grads, input cotangents and the update are those without a scale."""
    loss, params = scenarios.stack()
    world = 2 if stage else 1
    batches = scenarios.vector_batches(world)
    one = torch.tensor(3.0, dtype=F64)

    def rank_main(rank: int) -> None:
        plain = fz.accumulate(SHARDS[stage](fz.train_step(loss, fz.adamw(1e-2))), count)
        scaled = fz.loss_scale(plain, scale)
        results = []
        for step in (plain, scaled):
            state = step.init(params)
            out, pullback = step.vjp(state, *batches[rank])
            grads, cotangents = pullback(one)
            kept = step.add_grads(step.add_grads(state, grads), grads)
            new, metrics = step.update(kept, grads)
            gathered = (fz.gather(grads), fz.gather(kept.grads), fz.gather(new.params))
            results.append((out, cotangents, gathered, metrics["grad_norm"], fz.global_norm(grads)))
            assert new.grads is None
        assert_trees_close(*results, rtol=1e-12)

    run_ranks(rank_main, world)


@in_turns(3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_is_not_finite_skips_on_all_ranks(stage: int) -> None:
    loss, params = scenarios.stack()
    batches = scenarios.vector_batches(2)

    def rank_main(rank: int) -> None:
        for donated in (False, True):
            step = fz.loss_scale(SHARDS[stage](fz.train_step(loss, fz.adamw(1e-2))), initial=64.0, interval=2)
            step = fz.donate(step) if donated else step
            state = step.init(params)
            before = fz.gather(state.params)
            x, y = batches[rank]
            bad = x.clone()
            if rank == 0:
                bad[0, 0] = float("nan")
            state, metrics = step(state, bad, y)
            assert bool(metrics["skipped"]) and state.step == 0 and state.extra["loss_scale"].scale == 32.0
            assert_trees_equal(fz.gather(state.params), before)
            for wanted in (32.0, 64.0, 64.0):
                state, metrics = step(state, x, y)
                assert not bool(metrics["skipped"]) and state.extra["loss_scale"].scale == wanted
            assert state.step == 3

    run_ranks(rank_main, 2 if stage else 1)


def test_small_fp16_gradients_survive_by_the_scale() -> None:
    """fp16 params and grads, fp32 moments: a gradient under fp16's smallest value is lost without the scale."""
    policy = fz.Policy(param=F16, grad=F16, moment=F32)
    base = fz.train_step(lambda p, x: (p["w"] * x).sum().float() * 1e-8, fz.sgd(1e6), policy)
    params, x = {"w": torch.zeros(4)}, torch.ones(4, dtype=F16)
    lost, _ = base(base.init(params), x)
    assert fz.gather(lost.params)["w"].abs().max() == 0
    scaled = fz.loss_scale(base, 2.0**12)
    kept, metrics = scaled(scaled.init(params), x)
    assert_trees_close(fz.gather(kept.params)["w"], torch.full((4,), -0.01), rtol=1e-2)
    assert metrics["grad_norm"].item() == pytest.approx(2e-8, rel=1e-2)


@in_turns(2)
@pytest.mark.parametrize("policy", ["fp32", "bf16 states"])
def test_all_stages_agree_to_the_bit(policy: str) -> None:
    """Losses and params over ten steps, in float32 and with bf16 params, grads and moments."""
    dtype, scheme = (F32, None) if policy == "fp32" else (BF16, fz.Policy.bf16_states())
    fn, params = float32_stack()
    data = scenarios.vector_batches(2, dtype=dtype)

    def losses_of(stage: int, rank: int) -> Any:
        step = SHARDS[stage](fz.train_step(fn, fz.adamw(1e-2), scheme))
        state, losses = step.init(params), []
        for _ in range(10):
            state, metrics = step(state, *data[rank])
            losses.append(metrics["loss"])
        return losses, fz.gather(state.params)

    first, *others = [run_ranks(functools.partial(losses_of, stage), 2)[0] for stage in (1, 2, 3)]
    for other in others:
        assert_trees_equal(other, first)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_states_follow_torch_over_many_steps(stage: int) -> None:
    """Multi-step parity of params for bf16 params, grads and moments: torch.optim.AdamW on a bf16 model, to the bit."""
    fn, params = scenarios.stack(dtype=BF16)
    batch = scenarios.vector_batches(1, dtype=BF16)[0]
    leaves, spec = pytree.tree_flatten(params)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    optimizer = torch.optim.AdamW(leaves, lr=1e-2, fused=True)
    for _ in range(10):
        optimizer.zero_grad()
        fn(pytree.tree_unflatten(leaves, spec), *batch).backward()
        optimizer.step()

    def rank_main(rank: int) -> None:
        step = SHARDS[stage](fz.train_step(fn, fz.adamw(1e-2), fz.Policy.bf16_states()))
        state = step.init(params)
        for _ in range(10):
            state, _ = step(state, *batch)
        assert_trees_equal(fz.gather(state.params), pytree.tree_unflatten([leaf.detach() for leaf in leaves], spec))

    run_ranks(rank_main, 1)
