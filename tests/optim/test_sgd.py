"""SGD by its formula: momentum and weight decay."""

from __future__ import annotations

import pytest
import torch

import fzero as fz
from fzero.testing import assert_trees_close


def test_momentum_sums_gradients_with_a_decay() -> None:
    optimizer, params = fz.sgd(0.1, momentum=0.5), {"w": torch.zeros(1)}
    state, updates = optimizer.init(params), []
    for grad in (1.0, 2.0, 4.0):
        update, state = optimizer.update({"w": torch.tensor([grad])}, state, params)
        updates.append(update["w"].item())
    assert_trees_close(torch.tensor(updates), -0.1 * torch.tensor([1.0, 2.5, 5.25]))
    assert state.count.value == 3


def test_nesterov_wants_a_momentum() -> None:
    with pytest.raises(ValueError, match=r"sgd\(nesterov=True\): got momentum=None, expected a momentum"):
        fz.sgd(0.1, nesterov=True)


def test_weight_decay_is_part_of_the_gradient_and_no_momentum_keeps_no_state() -> None:
    optimizer, params = fz.sgd(0.1, weight_decay=0.5), {"w": torch.tensor([4.0])}
    updates, state = optimizer.update({"w": torch.tensor([1.0])}, optimizer.init(params), params)
    assert_trees_close(updates["w"], torch.tensor([-0.3]))
    assert state.momentum is None
