"""The update: a new state beside the old one, skipped where the norm is not finite."""

from __future__ import annotations

import pytest
import torch

import fzero as fz
from fzero.testing import assert_trees_equal

STEP = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.adamw(0.1))
X = torch.tensor([1.0, -2.0])


def test_the_old_state_stays_and_counts_on() -> None:
    old = STEP.init({"w": torch.ones(2)})
    new, metrics = STEP(old, X)
    assert (old.step, new.step) == (0, 1) and not metrics["skipped"]
    assert_trees_equal(fz.gather(old.params)["w"], torch.ones(2))
    again, _ = STEP(old, X)
    assert_trees_equal(fz.gather(again.params), fz.gather(new.params))


def test_an_update_that_is_not_finite_changes_nothing() -> None:
    old = STEP.init({"w": torch.ones(2)})
    new, metrics = STEP(old, X * float("inf"))
    assert metrics["skipped"] and new.step == 0
    assert_trees_equal(fz.gather(new.moments.mu), fz.gather(old.moments.mu))
    with pytest.raises(ValueError, match="expected at least 0"):
        STEP.update(old, STEP.vjp(old, X)[1](torch.ones(()))[0], grad_norm=-1.0)
