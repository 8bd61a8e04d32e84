"""TrainState, layout and purity: a pytree of flat buffers, mapped both ways, never written."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import optree
import pytest
import scenarios
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given
from hypothesis import strategies as st

import fzero as fz
from fzero.formats.formats import ALIGN
from fzero.table.layout import Layout
from fzero.testing import (
    assert_no_alias,
    assert_not_mutated,
    assert_trees_close,
    assert_trees_equal,
    run_ranks,
    strategies,
)

SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}


@given(tree=strategies.pytrees(), stage=st.sampled_from([0, 1, 2, 3]), world=st.integers(1, 4), bf16=st.booleans())
def test_gather_of_init_is_the_identity(tree: Any, stage: int, world: int, bf16: bool) -> None:
    world = world if stage else 1
    policy = fz.Policy(compute=torch.bfloat16) if bf16 else None

    def rank_main(rank: int) -> None:
        step = SHARDS[stage](fz.train_step(lambda p: p, fz.adamw(1e-3), policy))
        state = assert_not_mutated(step.init, tree)
        full = fz.gather(state.params)
        assert_trees_equal(full, tree)
        assert_no_alias(full, tree)
        assert_no_alias(full, state)
        assert_no_alias(state, tree)
        assert all((leaf == 0).all() for leaf in optree.tree_leaves(fz.gather(state.moments)))

    run_ranks(rank_main, world)


@given(tree=strategies.pytrees(max_leaves=12), shards=st.integers(1, 5), policy=strategies.policies())
def test_layout_is_aligned_and_covers_every_leaf_once(tree: Any, shards: int, policy: Any) -> None:
    step = fz.train_step(lambda p: p, fz.sgd(0.1), policy)
    plan = fz.plan(fz.shard_zero3(step), tree, world_size=shards)
    layout = plan.layout
    seen = []
    for key, group in layout.groups.items():
        assert group.numel % (ALIGN * shards) == 0 and sum(group.split_sizes) == group.numel
        end = 0
        for slot in group.slots:
            assert slot.offset % ALIGN == 0 and slot.offset >= end
            end = slot.offset + slot.numel
            seen.append(slot.leaf)
            pieces = [p for rank in range(shards) for s, a, b in layout.pieces(key, rank) for p in [b - a] if s is slot]
            assert sum(pieces) == slot.numel
        assert group.numel - end < ALIGN * shards
        buffer = torch.arange(group.numel, dtype=torch.float64)
        packed = group.full_of([*group.views(buffer).values()], buffer.dtype, buffer.device)
        for index, view in group.views(packed).items():
            assert_trees_equal(view, group.views(buffer)[index])
    assert sorted(seen) == list(range(len(layout.rows)))
    assert Layout.build(plan.rows, shards) == layout and hash(Layout.build(plan.rows, shards)) == hash(layout)


def test_a_state_is_a_pytree_for_both_libraries() -> None:
    loss, params = scenarios.stack()
    step = fz.train_step(loss, fz.adamw(1e-2))
    first = step.init(params)
    second, _ = step(first, *scenarios.vector_batches(1)[0])
    for tree_map in (optree.tree_map, torch_pytree.tree_map):
        mean = tree_map(lambda a, b: (a + b) / 2, first, second)
        assert isinstance(mean, fz.TrainState)
        for path in ("blocks.0.w", "head.b"):
            assert torch.equal(mean.params[path], (first.params[path] + second.params[path]) / 2)
    leaves, spec = optree.tree_flatten(second)
    assert len(leaves) == 3 * len(second.layout.groups) and all(leaf.ndim == 1 for leaf in leaves)
    again = optree.tree_unflatten(spec, leaves)
    for name in ("step", "extra", "seed", "signature"):
        assert getattr(again, name) == getattr(second, name)
    assert again.moments.count.value == 1 and again.params.scale == 1.0
    assert optree.tree_structure(step.init(params)) == optree.tree_structure(second)
    third, _ = step(again, *scenarios.vector_batches(1)[0])
    assert third.step == 2
    with pytest.raises(KeyError, match=r"no leaf 'nowhere'; the leaves are blocks\.0\.b"):
        first.params["nowhere"]
    with pytest.raises(TypeError, match=r"got \['weights'\], expected some of params"):
        first.replace(weights=1)


@given(chosen=strategies.transforms(stages=(0, 1, 2, 3)))
def test_a_step_is_pure_unless_it_donates(chosen: Any) -> None:
    chosen = [pair for pair in chosen if pair[0] != "donate"]
    loss, params = scenarios.stack()
    batch = scenarios.vector_batches(1)[0]

    def rank_main(rank: int) -> None:
        step = strategies.apply(fz.train_step(loss, fz.adamw(1e-2)), chosen)
        state = step.init(params)
        new, _ = assert_not_mutated(step, state, *batch)
        assert_no_alias(new, state)
        again, _ = step(state, *batch)
        assert_trees_equal(new, again)
        out, pullback = assert_not_mutated(step.vjp, state, *batch)
        grads, _ = pullback(torch.ones_like(out))
        kept = assert_not_mutated(step.add_grads, state, grads)
        assert_no_alias(kept.grads, grads)
        assert_not_mutated(step.update, kept, grads)

    run_ranks(rank_main, 1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_donation_writes_in_place_and_spares_other_holders(stage: int) -> None:
    loss, params = scenarios.stack()
    batch = scenarios.vector_batches(1)[0]

    def rank_main(rank: int) -> None:
        base = SHARDS[stage](fz.train_step(loss, fz.adamw(1e-2)))
        step = fz.donate(base)
        want, _ = base(base.init(params), *batch)
        state = step.init(params)
        pointers = {leaf.data_ptr() for leaf in optree.tree_leaves(state)}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            state, _ = step(state, *batch)
        assert {leaf.data_ptr() for leaf in optree.tree_leaves(state)} == pointers
        assert_trees_equal(state, want)
        for hold in (
            lambda state: state.params["head.w"],
            lambda state: state.params.local(state.layout.key_of["blocks.0.w"][0]).detach(),
            lambda state: optree.tree_leaves(state)[0],
            lambda state: state.replace(step=7),
            lambda state: optree.tree_map(lambda t: t.view(-1), state),
        ):
            state = step.init(params)
            held = hold(state)
            before = optree.tree_map(torch.clone, held)
            with pytest.warns(UserWarning, match=r"donated state are still held elsewhere \(that of leaf '") as caught:
                new, _ = step(state, *batch)
            assert len(caught) == 1
            assert_trees_equal(held, before)
            assert_trees_equal(new, want)

    run_ranks(rank_main, 1)


def test_leaves_made_by_callables_unit_by_unit() -> None:
    loss, params = scenarios.stack()
    calls: list[str] = []

    def maker(path: str, leaf: torch.Tensor) -> Any:
        def make() -> torch.Tensor:
            calls.append(path)
            return torch.zeros(leaf.shape, dtype=leaf.dtype) + leaf

        return make

    lazy = optree.tree_map_with_path(lambda path, leaf: maker(".".join(map(str, path)), leaf), params)

    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(loss, fz.adamw(1e-2)))
        assert_trees_equal(fz.gather(step.init(lazy).params), params)

    run_ranks(rank_main, 2)
    assert fz.plan(fz.shard_zero3(fz.train_step(loss, fz.adamw(1e-2))), lazy, world_size=2).params > 0


def test_the_plan_prints_the_table() -> None:
    loss, params = scenarios.tiny_lm()
    step = fz.freeze(fz.autocast(fz.shard_zero3(fz.train_step(loss, fz.adamw(1e-3)))), "embed*")
    step = fz.donate(fz.accumulate(fz.remat(step), 2))
    text = str(fz.plan(step, params, world_size=4))
    assert "blocks.0.up.weight    10×7" in text and "frozen" in text and "4 ranks" in text
    assert "accumulate: 2 microbatches" in text and "donate" in text
    rules = str(step)
    for said in ("shard_zero3(axis='dp')", "autocast(torch.bfloat16)", "freeze('embed*')", "remat()"):
        assert said in rules
    fake = {name: torch.empty_like(leaf, device="meta") for name, leaf in params.items()}
    assert str(fz.plan(step, fake, world_size=4)) == text


def test_with_fn_and_aux() -> None:
    loss, params = scenarios.stack()
    x, y = scenarios.vector_batches(1)[0]
    step = fz.accumulate(fz.train_step(lambda p, x, y: (loss(p, x, y), {"x": x, "n": 1}), fz.sgd(0.1), has_aux=True), 2)
    state = step.init(params)
    out, pullback, aux = step.vjp(state, x, y)
    assert_trees_equal(aux["x"], x)
    assert_trees_close(out, loss(params, x, y), rtol=1e-12)
    assert step(state, x, y)[1]["aux"]["x"].shape == x.shape
    evaluate = fz.with_fn(step, lambda p, x: x @ p["head"]["w"], has_aux=False)
    assert_trees_close(evaluate.forward(state, x), x @ params["head"]["w"], rtol=1e-12)
    assert pullback(torch.ones_like(out))[1][0].shape == x.shape


def _loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (p["w"] * x).sum()


@pytest.mark.parametrize("transform", [lambda step: step, fz.fuse_update, fz.donate, fz.loss_scale])
def test_a_state_of_one_process_is_pickled_and_copied(transform: Callable[[fz.Step], fz.Step]) -> None:
    x, step = torch.ones(4), transform(fz.train_step(_loss, fz.adamw(0.1)))
    state, _ = step(step.init({"w": torch.ones(4)}), x)
    others = [pickle.loads(pickle.dumps(state)), copy.deepcopy(state)]
    wanted = fz.gather(step(state, x)[0].params)
    for other in others:
        assert_trees_equal(fz.gather(step(other, x)[0].params), wanted)


def test_a_state_is_checked_wherever_it_was_not_made_by_the_step() -> None:
    loss = lambda p, x: (p["w"] * x).sum()
    step, x = fz.train_step(loss, fz.sgd(0.1)), torch.ones(3)
    state, _ = step(step.init({"w": torch.ones(3)}), x)
    assert state.is_made_by(step)
    copies = copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state)), state.replace(seed=1)
    assert not any(own.is_made_by(step) for own in copies)
    bad = torch_pytree.tree_map(lambda x: x.view(1, -1), state)
    with pytest.raises(ValueError, match="Map functions that keep shapes"):
        step(bad, x)
    for other in (fz.train_step(loss, fz.adamw(0.1)), fz.ema(step, 0.9)):
        with pytest.raises(ValueError, match=r"convert it|this step's init"):
            other(state, x)


def test_a_state_keeps_no_step_alive() -> None:
    step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
    state, _ = step(step.init({"w": torch.ones(3)}), torch.ones(3))
    held = weakref.ref(step)
    del step
    gc.collect()
    assert held() is None and state.step == 1
