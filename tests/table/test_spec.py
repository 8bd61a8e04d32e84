"""What a step was asked to be: rules and headers give new steps, and are said once."""

from __future__ import annotations

import pytest
import torch

import fzero as fz

STEP = fz.train_step(lambda p: p["w"].sum(), fz.sgd(0.1))


def test_a_rule_makes_a_new_step_and_leaves_the_old_one() -> None:
    frozen = fz.freeze(STEP, "w")
    assert frozen is not STEP and "freeze" in str(frozen) and "freeze" not in str(STEP)
    params = {"w": torch.ones(1), "v": torch.ones(1)}
    assert [row.frozen for row in fz.plan(frozen, params).rows] == [False, True]


def test_two_values_of_one_header_are_refused() -> None:
    with pytest.raises(ValueError, match=r"accumulate\(3\): this step already has microbatches=.*count=2"):
        fz.accumulate(fz.accumulate(STEP, 2), 3)
