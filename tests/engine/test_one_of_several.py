"""One of several outputs of a unit is no input of torch.autograd.grad, unless nothing else depends on the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fzero as fz
from fzero.testing import run_ranks


@fz.unit
def two(p: Any, x: torch.Tensor, joint: bool) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.tanh(x @ p["w"])
    return a, torch.sin(a if joint else x @ p["v"])


def loss(params: Any, x: torch.Tensor, joint: bool) -> torch.Tensor:
    a, b = two(params["b"][0], x, joint)
    (found,) = torch.autograd.grad(a.square().sum() + b.sum(), a, create_graph=True)
    return found.square().mean()


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("joint", [True, False])
def test_gradient_by_one_of_several_outputs(joint: bool, remat: bool) -> None:
    made = torch.Generator().manual_seed(0)
    params = {"b": [{name: torch.randn(4, 4, generator=made) for name in "wv"}]}
    x = torch.randn(6, 4, generator=made)

    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(loss, fz.sgd(0.1)))
        step = fz.remat(step) if remat else step
        with pytest.raises(ValueError, match="by one of 2 tensors that unit"):
            step.vjp(step.init(params), x, joint)

    run_ranks(rank_main, 1)
