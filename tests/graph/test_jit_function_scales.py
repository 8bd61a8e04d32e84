"""fz.loss_scale in a function's graph: the scale is a value of the graph, which no step's result shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

GENERATOR = torch.Generator().manual_seed(0)
PARAMS = {"blocks": [{"w": torch.randn(4, 4, dtype=torch.float64, generator=GENERATOR)} for _ in range(2)]}
X, Y = torch.randn(2, 4, 4, dtype=torch.float64, generator=GENERATOR)
BAD = {2, 4, 5, 9}  # updates whose gradients are not finite
block = fz.unit(lambda p, x: torch.tanh(x @ p["w"]))


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    for q in p["blocks"]:
        x = block(q, x)
    return (x - Y[: len(x)]).square().mean()


SCALES: dict[str, Callable[[fz.Step], fz.Step]] = {
    "dynamic": lambda step: fz.loss_scale(step, initial=1024.0, interval=3),
    "hysteresis": lambda step: fz.loss_scale(step, initial=1024.0, interval=3, hysteresis=2, minimum=512.0),
    "consecutive, late": lambda step: fz.loss_scale(step, interval=2, hysteresis=2, consecutive=True, late=True),
    "fixed": lambda step: fz.loss_scale(step, 64.0),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", SCALES)
def test_numbers_and_scales_of_the_step(name: str, ranks: int) -> None:
    def run(rank: int) -> int:
        step = fz.shard_zero3(SCALES[name](fz.train_step(loss, fz.adamw(1e-2))))
        fast = fz.jit(lambda state, x: step(state, x), backend="graph")
        state = other = step.init(PARAMS)
        for i in range(12):
            x = X.chunk(ranks)[rank] * (torch.nan if i in BAD else 1)
            state, metrics = step(state, x)
            other, found = fast(other, x)
            assert repr(other.extra["loss_scale"]) == repr(state.extra["loss_scale"])
            assert found["loss_scale"] == metrics["loss_scale"] and found["skipped"] == metrics["skipped"]
            assert other.step == state.step
            assert_trees_close(fz.gather(other.params), fz.gather(state.params), rtol=1e-10)
        return fast.traces

    assert run_ranks(run, ranks) == [1] * ranks


def test_vjp_and_a_derivative() -> None:
    step = SCALES["dynamic"](fz.train_step(loss, fz.adamw(1e-2)))

    def after(state: fz.TrainState, x: torch.Tensor) -> Any:
        state, _ = step(state, x)
        out, pullback = step.vjp(state, x)
        grads, (cotangent,) = pullback(torch.ones_like(out))
        state, metrics = step.update(step.add_grads(state, grads), grads)
        return step.forward(state, x) + metrics["grad_norm"] + cotangent.square().sum(), state

    fn = lambda state, x: torch.func.grad(after, argnums=1, has_aux=True)(state, x)
    fast, state = fz.jit(fn, backend="graph"), step.init(PARAMS)
    for x in (X, 2 * X, X):
        (want, new), (got, other) = fn(state, x), fast(state, x)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=0)
        assert other.extra == new.extra and other.step == new.step
    assert fast.traces == 1


def test_half_precision_overflows_as_without_a_graph() -> None:
    policy = fz.Policy(param=torch.float32, compute=torch.float16, grad=torch.float16)
    step = fz.loss_scale(fz.train_step(loss, fz.sgd(0.1), policy=policy), initial=2.0**20, interval=3)
    fast = fz.jit(lambda state, x: step(state, x), backend="graph")
    state = other = step.init(PARAMS)
    for i in range(12):
        x = (X * (1 + i % 3)).half()
        state, metrics = step(state, x)
        other, found = fast(other, x)
        assert repr(other.extra) == repr(state.extra) and found["skipped"] == metrics["skipped"]
        assert_trees_close(fz.gather(other.params), fz.gather(state.params), rtol=1e-3)
    assert 1 < state.extra["loss_scale"].scale < 2.0**20
