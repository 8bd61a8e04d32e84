"""Leaves that autograd gives one and the same cotangent: their gradients are tensors of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nightly import in_turns
from units import forms

import fzero as fz
from fzero.testing import run_ranks

TRANSFORMS = forms("plain", "ZeRO-1", "ZeRO-3", "ZeRO-3, remat")


@in_turns(2)
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("count", [1, 2])
def test_gradients_share_no_memory(name: str, ranks: int, count: int) -> None:
    add: Callable[..., Any] = lambda p, h: h + p["w"]
    block = fz.unit(add)

    def loss(params: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
        h = x
        for p in params["blocks"]:  # each leaf is all of its buffer
            h = block(p, h)
        return (h**3).sum()

    params = {"blocks": [{"w": torch.full((16, 16), 0.1 * i, dtype=torch.float64)} for i in range(3)]}
    x = torch.linspace(0, 1, count * 256, dtype=torch.float64).view(count * 16, 16)

    def rank_main(_: int) -> None:
        step = TRANSFORMS[name](fz.train_step(loss, fz.sgd(0.1)))
        state = step.init(params)
        grads, (cotangent,) = step.vjp(state, x[:16])[1](torch.ones((), dtype=torch.float64))
        tensors = [g for g in (*grads.entries.values(), cotangent) if isinstance(g, torch.Tensor)]
        assert len({g.untyped_storage().data_ptr() for g in tensors}) == len(tensors)
        step = fz.accumulate(step, count)
        new = fz.gather(step(step.init(params), x)[0].params)
        own = [p["w"].clone().requires_grad_() for p in params["blocks"]]
        mean = sum(loss({"blocks": [{"w": w} for w in own]}, part) for part in x.chunk(count)) / count
        for got, w, g in zip(new["blocks"], own, torch.autograd.grad(mean, own), strict=True):  # type: ignore[arg-type]
            torch.testing.assert_close(got["w"], (w - 0.1 * g).detach(), rtol=1e-12, atol=1e-12)

    run_ranks(rank_main, ranks)
