"""The update: a new state beside the old one, skipped where the norm is not finite."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import fzero as fz
from fzero.testing import assert_trees_equal

STEP = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.adamw(0.1))
X = torch.tensor([1.0, -2.0])


def test_an_update_that_is_not_finite_changes_nothing() -> None:
    old = STEP.init({"w": torch.ones(2)})
    new, metrics = STEP(old, X * float("inf"))
    assert metrics["skipped"] and new.step == 0
    assert_trees_equal(fz.gather(new.moments.mu), fz.gather(old.moments.mu))
    with pytest.raises(ValueError, match="expected at least 0"):
        STEP.update(old, STEP.vjp(old, X)[1](torch.ones(()))[0], grad_norm=-1.0)


def users(fail_at: str = "") -> fz.GradientTransformation:
    """Plain gradient descent as a user writes it."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        if fail_at:
            raise KeyError(fail_at)
        return optree.tree_map(lambda g: -0.1 * g, grads), state

    return fz.GradientTransformation(lambda params: (), update, elementwise=True)


def test_a_donated_state_whose_update_fails_halfway_says_so() -> None:
    optimizer = fz.partition({"a": fz.sgd(0.1), "b": users(fail_at="here")})
    step = fz.donate(fz.train_step(lambda p: p["a"].sum() + p["b"].sum(), optimizer))
    state = step.init({"a": torch.ones(2), "b": torch.ones(2)})
    with pytest.raises(KeyError):
        step(state)
    with pytest.raises(
        RuntimeError, match=r"donated to update 1, which had begun with .*'a'.* and then failed \(KeyError"
    ):
        step(state)


def test_an_error_in_an_own_update_leaves_a_donated_state_dead_and_others_alone() -> None:
    def failing(grads: Any, state: Any, params: Any) -> Any:
        raise KeyError("no such leaf")

    own = fz.GradientTransformation(lambda params: (), failing, elementwise=True)
    step = fz.train_step(lambda p: p["a"].sum(), own)
    for each, dead in ((step, False), (fz.donate(step), True)):
        state = each.init({"a": torch.ones(3)})
        with pytest.raises(KeyError, match="no such leaf"):
            each(state)
        if not dead:
            assert fz.gather(state.params)["a"].equal(torch.ones(3))
            continue
        with pytest.raises(RuntimeError, match=r"donated to update 1, which had begun with .*'a'.* and then failed"):
            state.params  # noqa: B018
