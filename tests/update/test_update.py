"""The update: a new state beside the old one, skipped where the norm is not finite."""

from __future__ import annotations

from typing import Any

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


def test_an_update_that_fails_halfway_leaves_a_donated_state_dead_and_others_alone() -> None:
    def failing(grads: Any, state: Any, params: Any) -> Any:
        raise KeyError("here")

    own = fz.GradientTransformation(lambda params: (), failing, elementwise=True)
    step = fz.train_step(lambda p: p["a"].sum() + p["b"].sum(), fz.partition({"a": fz.sgd(0.1), "b": own}))
    for each in (step, fz.donate(step)):
        state = each.init({"a": torch.ones(2), "b": torch.ones(2)})
        with pytest.raises(KeyError, match="here"):
            each(state)
        if each is step:
            assert_trees_equal(fz.gather(state.params), {"a": torch.ones(2), "b": torch.ones(2)})
            continue
        for use in (lambda each=each, state=state: each(state), lambda state=state: state.params):
            with pytest.raises(RuntimeError, match=r"donated to update 1, .* with .*'a'.* and then failed \(KeyError"):
                use()
