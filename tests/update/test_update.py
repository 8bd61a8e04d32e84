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
    """Plain gradient descent as a user writes it, with a fused form of its own."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        return optree.tree_map(lambda g: -0.1 * g, grads), state

    def fused(params: Any, grads: Any, state: Any) -> Any:
        if fail_at:
            raise KeyError(fail_at)
        for key in params.groups:
            params.local(key).sub_(0.1 * grads.local(key))
        return state

    return fz.GradientTransformation(lambda params: (), update, fused, elementwise=True)


@pytest.mark.parametrize("policy", [None, fz.Policy.exact(), fz.Policy.compact24()])
@pytest.mark.parametrize("around", ["scale", "clip", "none"])
def test_a_users_fused_update_is_its_update(around: str, policy: Any) -> None:
    params = {"w": torch.linspace(1, 2, 8).reshape(4, 2)}

    def trained(member: fz.GradientTransformation) -> torch.Tensor:
        optimizer = fz.chain(fz.clip_by_global_norm(0.1), member) if around == "clip" else member
        step = fz.train_step(lambda p: p["w"].square().sum(), optimizer, policy)
        step = fz.loss_scale(step, 1024.0) if around == "scale" else step
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state)
        return fz.gather(state.params)["w"]

    torch.testing.assert_close(trained(users()), trained(users()._replace(fused=None)), rtol=1e-6, atol=0)


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
