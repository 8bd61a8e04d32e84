"""A batch of cotangents that the step's function pulls back at once, by torch.autograd.grad(is_grads_batched=True)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fzero as fz
from fzero.testing import assert_trees_close

F64 = torch.float64
W = {"blocks": [{"w": torch.linspace(-1, 1, 9, dtype=F64).view(3, 3)} for _ in range(2)]}
X = torch.linspace(-1, 2, 6, dtype=F64).view(2, 3)


@fz.unit
def block(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"])


def chain(p: Any, x: torch.Tensor) -> torch.Tensor:
    for q in p["blocks"]:
        x = block(q, x)
    return x


def by_autograd(p: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    y = chain(p, x)
    (rows,) = torch.autograd.grad(y.sum(0), x, torch.eye(3, dtype=F64), is_grads_batched=True, create_graph=True)
    return y.mean() + rows.square().mean()


def by_jacrev(p: Any, x: torch.Tensor) -> torch.Tensor:
    return chain(p, x).mean() + torch.func.jacrev(lambda x: chain(p, x).sum(0))(x).square().mean()


def test_it_gives_the_same_or_is_refused_by_name() -> None:
    def after(transform: Any, fn: Any) -> Any:
        step = transform(fz.train_step(fn, fz.sgd(0.1)))
        state = step.init(W)
        for _ in range(3):
            state, _ = step(state, X)
        return fz.gather(state.params)

    assert_trees_close(
        *[after(each, by_jacrev) for each in (lambda step: step, fz.remat)], after(fz.donate, by_autograd)
    )
    with pytest.raises(TypeError, match=r"in 'by_autograd', test_pullback_batched.py, line \d+\).*torch.func.jacrev"):
        after(fz.remat, by_autograd)
