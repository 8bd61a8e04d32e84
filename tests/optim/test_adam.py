"""Adam and AdamW: the bias of the first update, and where weight decay goes in."""

from __future__ import annotations

import pytest
import torch

import fzero as fz
from fzero.testing import assert_trees_close

P, G = torch.tensor([2.0, -3.0]), torch.tensor([1e-3, -50.0])


def first_update(optimizer: fz.GradientTransformation) -> torch.Tensor:
    return optimizer.update({"w": G}, optimizer.init({"w": P}), {"w": P})[0]["w"]


def test_the_first_update_has_the_size_of_the_rate() -> None:
    assert_trees_close(first_update(fz.adam(0.1, eps=0.0)), -0.1 * G.sign(), rtol=1e-6)


def test_weight_decay_is_decoupled_in_adamw_and_part_of_the_gradient_in_adam() -> None:
    assert_trees_close(first_update(fz.adamw(0.1, eps=0.0, weight_decay=0.5)), -0.1 * (G.sign() + 0.5 * P), rtol=1e-6)
    coupled = (G + 0.5 * P).sign()
    assert_trees_close(first_update(fz.adam(0.1, eps=0.0, weight_decay=0.5)), -0.1 * coupled, rtol=1e-6)


def test_a_decay_that_never_ends_is_refused() -> None:
    with pytest.raises(ValueError, match=r"adamw\(b2=\.\.\.\): got 1\.0"):
        fz.adamw(0.1, b2=1.0)
