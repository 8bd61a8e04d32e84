"""Clipping by value and by the norm of all gradients, also jointly with those of another component."""

from __future__ import annotations

import pytest
import torch

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal

F64 = torch.float64


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


def test_bounds_that_are_not_positive_are_refused() -> None:
    for bad in (0.0, -1.0):
        with pytest.raises(ValueError, match=r"expected a positive"):
            fz.clip_by_global_norm(bad)
        with pytest.raises(ValueError, match=r"expected a positive"):
            fz.clip_by_value(bad)


def test_leaves_are_clipped_where_moments_are_in_few_bits() -> None:
    optimizer = fz.chain(fz.clip_by_block_norm(1.0), fz.adamw(0.1))
    step = fz.train_step(lambda p, x: (p["w"].float() * x).sum(), optimizer, fz.Policy.compact16())
    state, metrics = step(step.init({"w": torch.ones(3)}), torch.full((3,), 5.0))
    assert not metrics["skipped"] and fz.gather(state.params)["w"].float().max() < 1.0


def test_a_number_out_of_range_under_a_map_is_said() -> None:
    with pytest.raises(ValueError, match=r"adamw\(b2=...\): got 1.5, expected a number in \[0, 1\)"):
        torch.vmap(lambda b2: fz.adamw(0.1, b2=b2).init({"w": torch.ones(1)}).mu["w"])(torch.tensor([0.5, 1.5]))
