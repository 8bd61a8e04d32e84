"""Optimizers: against torch.optim, update against fused, chains, partitions, clipping, schedules."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import scenarios
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks

F64 = torch.float64
CASES: dict[str, tuple[Any, Any]] = {
    "adamw": (
        lambda: fz.adamw(1e-2, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    ),
    "adam": (
        lambda: fz.adam(1e-2, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    ),
    "sgd": (lambda: fz.sgd(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (
        lambda: fz.sgd(0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    "lion": (lambda: fz.lion(1e-2, b1=0.9, b2=0.95, weight_decay=0.1), None),
}


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.mark.parametrize("name", sorted(CASES))
def test_against_torch_and_fused_against_update(name: str) -> None:
    make, theirs = CASES[name]
    optimizer = make()
    params = {"a": draw(0, 5, 3), "b": draw(1, 70)}
    leaves = [leaf.clone().requires_grad_() for leaf in params.values()]
    reference = theirs(leaves) if theirs else None
    fused = {key: leaf.clone() for key, leaf in params.items()}
    state, fused_state = optimizer.init(params), optimizer.init(params)
    step = fz.train_step(lambda p: sum((p[key] * grads[key]).sum() for key in p), optimizer)
    stepped = step.init(params)
    for count in range(5):
        grads = {"a": draw(10 + count, 5, 3), "b": draw(20 + count, 70)}
        updates, state = optimizer.update(grads, state, params)
        params = {key: params[key] + updates[key] for key in params}
        fused_state = optimizer.fused(fused, grads, fused_state)  # type: ignore[misc]
        stepped, _ = step(stepped)
        assert_trees_close(fused, fz.gather(stepped.params), params, rtol=1e-12)
        if reference:
            for leaf, grad in zip(leaves, grads.values(), strict=True):
                leaf.grad = grad
            reference.step()
            assert_trees_close(params, dict(zip(params, [leaf.detach() for leaf in leaves], strict=True)), rtol=1e-12)


def test_lion_by_its_formula() -> None:
    p, g, m = draw(0, 4), draw(1, 4), draw(2, 4)
    optimizer = fz.lion(0.1, b1=0.9, b2=0.5, weight_decay=0.2)
    state = optimizer.init({"w": p})._replace(mu={"w": m})
    updates, state = optimizer.update({"w": g}, state, {"w": p})
    assert_trees_close(updates["w"], -0.1 * ((0.9 * m + 0.1 * g).sign() + 0.2 * p), rtol=1e-14)
    assert_trees_close(state.mu["w"], 0.5 * m + 0.5 * g, rtol=1e-14)


@given(stage=st.sampled_from([0, 1, 2, 3]), donated=st.booleans(), world=st.integers(1, 3))
def test_an_optimizer_in_optax_shape(stage: int, donated: bool, world: int) -> None:
    """A user's pair (init, update) without fused, on any pytree, with a state of its own."""

    def update(grads: Any, state: Any, params: Any) -> Any:
        import optree

        state = optree.tree_map(lambda s, g: 0.5 * s + g, state, grads)
        return optree.tree_map(lambda s: -0.1 * s, state), state

    def init(params: Any) -> Any:
        import optree

        return optree.tree_map(torch.zeros_like, params)

    mine = fz.GradientTransformation(init, update)
    loss, params = scenarios.stack()
    world = world if stage else 1
    batches = scenarios.vector_batches(world)

    def rank_main(rank: int) -> Any:
        out = []
        for optimizer in (mine, fz.sgd(0.1, momentum=0.5), fz.chain(fz.clip_by_value(100.0), mine)):
            shard = {0: lambda s: s, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}[stage]
            step = shard(fz.train_step(loss, optimizer))
            step = fz.donate(step) if donated else step
            state = step.init(params)
            for _ in range(3):
                state, _ = step(state, *batches[rank])
            out.append(fz.gather(state.params))
        assert_trees_close(*out, rtol=1e-12)

    run_ranks(rank_main, world)


@pytest.mark.parametrize("stage", [0, 3])
def test_partition_is_a_column_of_the_table(stage: int) -> None:
    loss, params = scenarios.tiny_lm()
    batch = scenarios.token_batches(1)[0]
    split = fz.partition({"*norm*|*bias": fz.sgd(0.1), "*": fz.adamw(fz.linear(0.1, 0.0, 10), weight_decay=0.5)})

    def rank_main(rank: int) -> None:
        step = fz.train_step(loss, fz.chain(fz.clip_by_global_norm(0.1), split))
        step = fz.shard_zero3(step) if stage else step
        rows = {row.path: row.optimizer for row in fz.plan(step, params, world_size=2).rows}
        assert rows["blocks.0.norm.weight"] == "sgd (*norm*|*bias)" and rows["blocks.0.up.weight"] == "adamw (*)"
        state = step.init(params)
        _, pullback = step.vjp(state, *batch)
        grads, _ = pullback(torch.ones((), dtype=F64))
        factor = min(1.0, 0.1 / fz.global_norm(grads).item())
        new, metrics = step.update(state, grads)
        full, old, g = fz.gather(new.params), fz.gather(state.params), fz.gather(grads)
        name = "blocks.0.norm.weight"
        assert_trees_close(full[name], old[name] - 0.1 * factor * g[name], rtol=1e-12)
        name = "blocks.0.up.weight"
        scaled = factor * g[name]
        assert_trees_close(full[name], old[name] - 0.1 * (scaled / (scaled.abs() + 1e-8) + 0.5 * old[name]), rtol=1e-9)
        assert metrics["lr"] == 0.1 and new.moments[-1]["*"].mu.keys == new.moments[-1]["*"].nu.keys

    run_ranks(rank_main, 2 if stage else 1)


@pytest.mark.parametrize("transform", [fz.shard_zero1, fz.shard_zero2, fz.shard_zero3])
def test_a_part_is_clipped_by_its_own_norm_over_all_its_groups(transform: Any) -> None:
    loss, params = scenarios.tiny_lm()
    batch = scenarios.token_batches(1)[0]
    split = fz.partition({"*norm*|*bias": fz.sgd(0.1), "*": fz.chain(fz.clip_by_global_norm(0.01), fz.sgd(0.1))})

    def one_update(step: Any) -> Any:
        state, _ = step(step.init(params), *batch)
        return fz.gather(state.params)

    plain = one_update(fz.train_step(loss, split))
    for got in run_ranks(lambda rank: one_update(transform(fz.train_step(loss, split))), 2):
        assert_trees_close(got, plain, rtol=1e-10)


def test_partition_mistakes() -> None:
    loss, params = scenarios.tiny_lm()
    with pytest.raises(ValueError, match=r"leaf 'blocks\.0\.down\.weight' matches none of|matches none of \*bias"):
        fz.train_step(loss, fz.partition({"*bias": fz.sgd(0.1)})).init(params)
    with pytest.raises(ValueError, match=r"the pattern 'nothing' is used for no leaf"):
        fz.train_step(loss, fz.partition({"nothing": fz.sgd(0.1), "*": fz.sgd(0.1)})).init(params)
    with pytest.raises(TypeError, match=r"partition: got a tree of type ModuleParams"):
        fz.partition({"*": fz.sgd(0.1)}).init(params)
    with pytest.raises(TypeError, match=r"chain: got member 0=function"):
        fz.chain(lambda g: g)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"chain: got no members"):
        fz.chain()
    for bad in (0.0, -1.0):
        with pytest.raises(ValueError, match=r"expected a positive"):
            fz.clip_by_global_norm(bad)
        with pytest.raises(ValueError, match=r"expected a positive"):
            fz.clip_by_value(bad)
    with pytest.raises(ValueError, match=r"adamw\(b2=\.\.\.\): got 1\.0"):
        fz.adamw(0.1, b2=1.0)


def test_clipping() -> None:
    grads = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    by_norm, by_value = fz.clip_by_global_norm(2.5), fz.clip_by_value(3.5)
    assert_trees_close(
        by_norm.update(grads, ())[0], {"a": torch.tensor([1.5, 0.0]), "b": torch.tensor([2.0])}, rtol=1e-6
    )
    assert_trees_equal(fz.clip_by_global_norm(5.0).update(grads, ())[0], grads)
    assert_trees_equal(by_value.update(grads, ())[0], {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([3.5])})
    assert_trees_close(by_norm.update(grads, (), joint_norm=10.0)[0]["b"], torch.tensor([1.0]), rtol=1e-6)
    zero = {"a": torch.zeros(2)}
    assert_trees_equal(by_norm.update(zero, ())[0], zero)


def test_a_joint_norm_clips_jointly() -> None:
    step = fz.train_step(
        lambda p, x: (p["w"] * x).sum(), fz.chain(fz.clip_by_value(1e9), fz.clip_by_global_norm(1.0), fz.sgd(1.0))
    )
    state = step.init({"w": torch.zeros(2, dtype=F64)})
    _, pullback = step.vjp(state, torch.tensor([3.0, 4.0], dtype=F64))
    grads, _ = pullback(torch.ones((), dtype=F64))
    assert fz.global_norm(grads, grads).item() == pytest.approx(50**0.5)
    new, metrics = step.update(state, grads, grad_norm=torch.tensor(10.0))
    assert_trees_close(fz.gather(new.params)["w"], torch.tensor([-0.3, -0.4], dtype=F64), rtol=1e-12)
    assert metrics["grad_norm"] == 5.0
    skipped, metrics = step.update(state, grads, grad_norm=torch.tensor(float("nan")))
    assert bool(metrics["skipped"]) and skipped.step == 0


def test_schedules_count_applied_updates() -> None:
    schedule = fz.warmup_cosine(1.0, warmup=4, total=12, end=0.1)
    rates = [schedule(count) for count in range(14)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[11] == pytest.approx(0.1) == rates[13]
    assert all(a > b for a, b in itertools.pairwise(rates[3:12]))
    step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(schedule))
    state = step.init({"w": torch.zeros(1, dtype=F64)})
    for x, lr in ((1.0, 0.25), (float("nan"), 0.5), (1.0, 0.5), (1.0, 0.75)):
        before = state
        state, metrics = step(state, torch.full((1,), x, dtype=F64))
        assert metrics["lr"].item() == pytest.approx(lr)
        assert bool(metrics["skipped"]) == (x != x) == (state.step == before.step)
    with pytest.raises(ValueError, match=r"warmup=5, total=3"):
        fz.warmup_cosine(1.0, 5, 3)
    assert fz.constant(0.5)(7) == 0.5 and fz.linear(0.0, 1.0, 4)(2) == 0.5 and fz.linear(0.0, 1.0, 4)(9) == 1.0
