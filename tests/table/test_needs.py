"""Arguments that belong to a step: a wrong kind is named before it is used."""

from __future__ import annotations

import pytest
import torch

import fzero as fz
from fzero.table import needs


def test_a_function_is_no_component() -> None:
    needs.need_function(lambda p: p, "train_step")
    for wrong in (torch.nn.Linear(1, 1), fz.train_step(lambda p: p, fz.sgd(0.1)), 3):
        with pytest.raises(TypeError, match=r"train_step: got fn="):
            needs.need_function(wrong, "train_step")
    assert needs.is_component(torch.nn.Linear) and not needs.is_component(len)


def test_a_rate_is_a_number_a_schedule_or_a_constant_tensor() -> None:
    for good in (0.1, fz.constant(0.1), torch.tensor(0.1)):
        needs.need_rate(good, "sgd")
    for wrong in ("0.1", torch.ones(2), torch.tensor(1), None):
        with pytest.raises(TypeError, match=r"sgd: got lr="):
            needs.need_rate(wrong, "sgd")
    with pytest.raises(TypeError, match=r"pass lr\.detach\(\)"):
        needs.need_rate(torch.tensor(0.1, requires_grad=True), "sgd")


def test_optimizers_of_torch_do_not_fit() -> None:
    with pytest.raises(
        TypeError, match=r"optimizers of torch's kind hold state of their own, and are given by their class"
    ):
        needs.need_optimizer(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1), "train_step")
