"""States and grads of another step or component are refused, and the message says what to do."""

from __future__ import annotations

import pytest
import torch

import fzero as fz

PARAMS = {"w": torch.ones(2)}


def step(optimizer: fz.GradientTransformation, fn: object = lambda p: p["w"].sum()) -> fz.Step:
    return fz.train_step(fn, optimizer)  # type: ignore[arg-type]


def test_a_state_of_another_optimizer_or_of_none() -> None:
    mine = step(fz.adamw(0.1))
    with pytest.raises(ValueError, match=r"moments of 'sgd', expected those of 'adamw'"):
        mine(step(fz.sgd(0.1, momentum=0.9)).init(PARAMS))
    with pytest.raises(TypeError, match="expected"):
        mine(PARAMS)  # type: ignore[arg-type]


def test_grads_that_are_no_grads() -> None:
    mine = step(fz.sgd(0.1))
    state = mine.init(PARAMS)
    with pytest.raises(TypeError, match=r"grads: got dict, expected"):
        mine.update(state, PARAMS)  # type: ignore[arg-type]
