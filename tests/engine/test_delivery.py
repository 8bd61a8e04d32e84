"""Every group's cotangents are added up and delivered once, whatever uses it, how often, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import scenarios
import torch
from units import X, params_of

import fzero as fz
from fzero.engine.delivery import Delivery
from fzero.engine.function import traversal_of
from fzero.table.layout import Key
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


def test_a_group_is_delivered_once_and_with_its_last_use() -> None:
    delivered: list[Key] = []
    loss, params = scenarios.stack()
    step = fz.train_step(loss, fz.sgd(0.1))
    state = step.init(params)
    traversal, _, _ = traversal_of(step, state, (0,))
    schedule, (first, *rest) = traversal.schedule, traversal.layout.trainable
    for keys in ((first,), (first, *rest)):
        schedule.called(keys)
    delivery = Delivery(schedule, state.params, {}, lambda key, _: delivered.append(key))
    for count in range(2):
        delivery.add(first, torch.zeros(traversal.layout.groups[first].numel))
        assert delivered == [first] * count
    delivery.finish({})
    assert sorted(delivered) == sorted(traversal.layout.trainable)
