"""The verbs of a step: a call is forward, pullback and update in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fzero as fz
from fzero.testing import assert_trees_equal

X = torch.tensor([1.0, -2.0])


def loss(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (p["w"] * x).square().sum()


STEP = fz.train_step(loss, fz.sgd(0.1))


def test_the_verbs_compute_what_a_call_does() -> None:
    state = STEP.init({"w": torch.ones(2)})
    called, metrics = STEP(state, X)
    out, pullback = STEP.vjp(state, X)
    grads, _ = pullback(torch.ones(()))
    by_hand, more = STEP.update(state, grads)
    assert_trees_equal(fz.gather(called.params), fz.gather(by_hand.params))
    assert metrics["loss"] == out == STEP.forward(state, X) == 5.0 and metrics["grad_norm"] == more["grad_norm"]


def test_grads_add_up_and_another_function_takes_the_same_state() -> None:
    state = STEP.init({"w": torch.ones(2)})
    grads, _ = STEP.vjp(state, X)[1](torch.ones(()))
    twice = STEP.add_grads(STEP.add_grads(state, grads), grads)
    assert_trees_equal(fz.gather(twice.grads)["w"], 2 * fz.gather(grads)["w"])
    other = fz.with_fn(STEP, lambda p, x: p["w"].sum())
    assert other.forward(state, X) == 2.0
    with pytest.raises(TypeError, match=r"train_step: got policy="):
        fz.train_step(loss, fz.sgd(0.1), "bf16")  # type: ignore[arg-type]


@pytest.mark.parametrize("verb", ["step", "vjp", "forward"])
def test_a_function_that_takes_from_an_empty_iterator_is_named(verb: str) -> None:
    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (p["w"] * next(iter([]))).sum()

    step = fz.train_step(loss, fz.sgd(0.1))
    state = step.init({"w": torch.ones(2)})
    call = step if verb == "step" else getattr(step, verb)
    with pytest.raises(RuntimeError, match=r"step: the function raised StopIteration \(in 'loss', test_step") as caught:
        call(state, torch.ones(2))
    assert isinstance(caught.value.__cause__, StopIteration)
