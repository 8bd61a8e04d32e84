"""fz.gather gives full tensors, new ones, whatever tree holds the sharded ones."""

from __future__ import annotations

import pytest
import scenarios
import torch
from torch.utils._pytree import tree_leaves, tree_map

import fzero as fz
from fzero.testing import assert_trees_equal, run_ranks


@pytest.mark.parametrize("policy", [None, fz.Policy.exact()])
def test_every_rank_gets_all_leaves(policy: fz.Policy | None) -> None:
    loss, params = scenarios.stack(dtype=torch.float32)

    def rank_main(rank: int) -> None:
        state = fz.shard_zero3(fz.train_step(loss, fz.adamw(0.1), policy)).init(params)
        found = fz.gather({"here": state.params, "beside": 3})
        assert_trees_equal(found["here"], params)
        assert found["beside"] == 3
        found["here"]["head"]["w"].zero_()
        assert_trees_equal(fz.gather(state.params), params)

    run_ranks(rank_main, 3)


def test_trees_without_shards_are_refused() -> None:
    state = fz.train_step(lambda p: p, fz.sgd(0.1)).init({"w": torch.ones(1)})
    for tree, words in ((state, "holds a whole state"), ({"w": torch.ones(1)}, "no tree is sharded")):
        with pytest.raises(TypeError, match=words):
            fz.gather(tree)


def test_over_several_trees_of_tensors() -> None:
    assert fz.global_norm({"a": torch.tensor([3.0])}, [torch.tensor([4.0])]).item() == 5.0
    with pytest.raises(TypeError, match="global_norm: got"):
        fz.global_norm({"a": "text"})
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(TypeError, match=rf"dtype {dtype} in trees\[0\], expected .*floating"):
            fz.global_norm({"a": torch.ones(1, dtype=dtype)})


@pytest.mark.parametrize("shard", [fz.shard_zero1, fz.shard_zero2, fz.shard_zero3])
def test_of_shards_it_is_that_of_the_whole(shard: object) -> None:
    loss, params = scenarios.stack()

    def rank_main(rank: int) -> tuple[float, float]:
        step = fz.loss_scale(shard(fz.train_step(loss, fz.sgd(0.1))), 64.0)  # type: ignore[operator]
        state = step.init(params)
        grads, _ = step.vjp(state, *scenarios.vector_batches(2)[rank])[1](torch.ones((), dtype=torch.float64))
        return fz.global_norm(grads).item(), fz.global_norm(fz.gather(grads)).item()

    for sharded, whole in run_ranks(rank_main, 2):
        assert sharded == pytest.approx(whole, rel=1e-12)


def test_moments_of_which_no_rank_has_slices() -> None:
    """Factors alone: every rank has them, so they are given as they are."""

    def rank_main(rank: int) -> None:
        step = fz.shard_zero1(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.adafactor(0.1)))
        state, _ = step(step.init({"w": torch.ones(2, 2)}), torch.ones(2, 2))
        for tree in (state.moments, {"of": [state.moments]}):
            assert_trees_equal(fz.gather(tree), tree)

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("optimizer", [fz.adafactor(0.1), fz.whole(fz.adamw(0.1)), fz.adamw(0.1), fz.muon(0.1)])
def test_what_is_gathered_is_the_callers_own(optimizer: fz.GradientTransformation) -> None:
    """Nothing of the state changes with it, also where every rank has all of a tensor."""
    params = {"w": torch.linspace(0, 1, 6).view(2, 3), "b": torch.ones(1, 1)}
    loss = lambda p, c: (p["w"].square().sum() * p["b"].sum(), {"n": c["n"] + 1})
    step = fz.ema(fz.carry(fz.train_step(loss, optimizer), {"n": torch.zeros(())}), 0.5)
    state, _ = step(step.init(params))
    copied = lambda x: x.clone() if isinstance(x, torch.Tensor) else x
    before = tree_map(copied, fz.gather([state.params, state.moments, state.extra]))
    for pattern in (None, "w"):
        for leaf in tree_leaves(fz.gather([state.params, state.moments, state.extra], pattern)):
            if isinstance(leaf, torch.Tensor):
                leaf.fill_(7.0)
        assert_trees_equal(fz.gather([state.params, state.moments, state.extra]), before)
