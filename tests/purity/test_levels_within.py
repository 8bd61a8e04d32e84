"""Tensors that a unit comes to unseen, within a transform of its own: the levels of both have the same number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fzero as fz

F64 = torch.float64
X = torch.tensor([[0.3, 0.2, -0.5]], dtype=F64)
PARAMS = {"blocks": [{"w": torch.eye(3, dtype=F64)}, {"w": torch.eye(3, dtype=F64).flip(0)}]}
HELD: dict[str, torch.Tensor] = {}


def by_grad(fn: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda x: fn(x).square().sum())(x)


def by_vjp(fn: Any, x: torch.Tensor) -> torch.Tensor:
    pair: Any = torch.func.vjp(fn, x)
    return pair[1](pair[0])[0]


def by_hessian(fn: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.hessian(lambda x: fn(x).square().sum())(x).sum((0, 1))


TRANSFORMS = (by_grad, by_vjp, by_hessian)


def loss_of(within: Any, get: Any, wrapped: Callable[[Any], Any]) -> Any:
    block = wrapped(lambda p, x: within(lambda x: torch.tanh(x @ p["w"]) * get(), x))

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        for each in p["blocks"]:
            x = block(each, x)
        return x.square().mean()

    return loss


@pytest.mark.parametrize("within", TRANSFORMS)
@pytest.mark.parametrize("act", [fz.remat, lambda step: fz.offload(step, params="host")])
@pytest.mark.filterwarnings("ignore:fz.offload to 'host'")
def test_is_refused_where_it_is_differentiated(act: Any, within: Any) -> None:
    step = act(fz.train_step(loss_of(within, lambda: HELD["w"], fz.unit), fz.sgd(0.1)))

    def around(w: torch.Tensor) -> torch.Tensor:
        HELD["w"] = w
        return step.forward(step.init(PARAMS), X)

    with pytest.raises(ValueError, match="closes over a tensor of shape"):
        torch.func.grad(around)(torch.tensor(1.3, dtype=F64))


@pytest.mark.parametrize("within", TRANSFORMS)
def test_is_right_where_it_is_given(within: Any) -> None:
    def value(w: torch.Tensor, wrapped: Callable[[Any], Any], act: Any) -> torch.Tensor:
        block = wrapped(lambda p, x, w: within(lambda x: torch.tanh(x @ p["w"]) * w, x))

        def loss(p: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            for each in p["blocks"]:
                x = block(each, x, w)
            return x.square().mean()

        if act is None:
            return loss(PARAMS, X, w)
        step = act(fz.train_step(loss, fz.sgd(0.1)))
        return step.forward(step.init(PARAMS), X, w)

    w = torch.tensor(1.3, dtype=F64)
    want = torch.func.grad(lambda w: value(w, lambda fn: fn, None))(w)
    torch.testing.assert_close(torch.func.grad(lambda w: value(w, fz.unit, fz.remat))(w), want)
