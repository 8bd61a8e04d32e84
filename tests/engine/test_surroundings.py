"""What surrounds a unit's call, a context variable here, surrounds each later run of it."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest
import torch

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

F64 = torch.float64
factor = contextvars.ContextVar("factor", default=1.0)


def body(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x @ p["w"]) * factor.get()


unit = fz.unit(body)


def called(fn: Any, p: Any, x: torch.Tensor, value: float | None) -> torch.Tensor:
    if value is None:
        return fn(p, x)
    token = factor.set(value)
    try:
        return fn(p, x)
    finally:
        factor.reset(token)


def chain(fn: Any, p: Any, x: torch.Tensor, value: float | None) -> torch.Tensor:
    return called(fn, p, called(fn, p, x, None), value).square().mean()


def force(fn: Any, p: Any, x: torch.Tensor, value: float | None) -> torch.Tensor:
    h = called(fn, p, x, None)
    with torch.enable_grad():
        h = h if h.requires_grad else h.detach().requires_grad_()
        (found,) = torch.autograd.grad(called(fn, p, h, value).square().sum(), h, create_graph=True)
    return (h - found).square().mean()


@pytest.mark.parametrize("order", [(0.5,), (None, 0.5), (0.5, None)])
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("loss", [chain, force])
def test_gradient(loss: Any, remat: bool, order: tuple[float | None, ...]) -> None:
    params, x = _given()
    w = params["w"].clone().requires_grad_()
    want = torch.autograd.grad(loss(body, {"w": w}, x, order[-1]), w)[0]

    def rank_main(rank: int) -> Any:
        step, state = _step(loss, remat, params)
        for value in order:
            out, pull = step.vjp(state, x, value)
            got, _ = pull(torch.ones_like(out))
        return fz.gather(got)["b"][0]["w"]

    assert_trees_close(run_ranks(rank_main, 1)[0], want)


@pytest.mark.parametrize("remat", [False, True])
def test_hvp(remat: bool) -> None:
    params, x = _given()
    grad = torch.func.grad(lambda p: chain(body, p, x, 0.5))
    want = torch.func.jvp(grad, (params,), (grad(params),))[1]

    def rank_main(rank: int) -> Any:
        step, state = _step(chain, remat, params)
        out, pull = step.vjp(state, x, 0.5)
        grads, _ = pull(torch.ones_like(out))
        return fz.gather(fz.hvp(step, state, grads, x, 0.5))["b"][0]

    assert_trees_close(run_ranks(rank_main, 1)[0], want)


def _given() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return {"w": torch.randn(4, 4, generator=made, dtype=F64)}, torch.randn(6, 4, generator=made, dtype=F64)


def _step(loss: Any, remat: bool, params: Any) -> tuple[Any, Any]:
    step = fz.shard_zero3(fz.train_step(lambda p, x, value: loss(unit, p["b"][0], x, value), fz.sgd(0.1)))
    step = fz.remat(step) if remat else step
    return step, step.init({"b": [params]})
