"""Every group's cotangents are added up and delivered once, whatever uses it, how often, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from units import X, params_of

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks


@pytest.mark.parametrize("shard", [fz.shard_zero1, fz.shard_zero2, fz.shard_zero3])
def test_three_uses_and_none(shard: Any) -> None:
    def plain(p: Any, x: torch.Tensor) -> torch.Tensor:
        w = p["blocks"][0]["w"]
        return (torch.tanh(torch.tanh(x @ w) @ w) * p["s"]).square().mean() + 0.1 * w.square().sum()

    unit = fz.unit(lambda q, x: torch.tanh(x @ q["w"]))
    norm = fz.unit(lambda q: q["w"].square().sum())

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        q = p["blocks"][0]
        return (unit(q, unit(q, x)) * p["s"]).square().mean() + 0.1 * norm(q)

    def rank_main(rank: int) -> None:
        step = shard(fz.train_step(fn, fz.sgd(0.1)))
        out, pullback = step.vjp(step.init(params_of()), X + rank)
        received: list[Any] = []
        grads, _ = pullback(torch.ones_like(out))
        received.append(fz.gather(grads))
        want = [torch.func.grad(plain)(params_of(), X + r) for r in range(2)]
        mean = torch.utils._pytree.tree_map(lambda a, b: (a + b) / 2, *want)  # type: ignore[attr-defined]
        assert_trees_close(received[0], mean, rtol=1e-10)
        assert not received[0]["blocks"][1]["w"].any()  # which nothing uses

    run_ranks(rank_main, 2)
