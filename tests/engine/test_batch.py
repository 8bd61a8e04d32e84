"""Microbatches run one after the other, and what they return is put together."""

from __future__ import annotations

from typing import Any

import scenarios
import torch

import fzero as fz
from fzero.engine.batch import Batch, Sums, sum_of
from fzero.stores.away import tensor_of
from fzero.table.layout import Key
from fzero.testing import assert_trees_close


def test_sums_are_written_into_the_first_term() -> None:
    key = Key("blocks.0", 0)
    first: Sums = {key: torch.ones(2)}
    second: Sums = {key: torch.full((2,), 3.0)}
    assert sum_of(None, first) is first
    total = sum_of(first, second)
    assert total[key] is first[key] and tensor_of(total[key]).tolist() == [4.0, 4.0]


def test_the_loss_is_the_mean_and_each_part_is_pulled_back_before_the_next_runs() -> None:
    loss, params = scenarios.stack()
    order: list[str] = []

    def fn(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        order.append("forward")
        return loss(p, x, y)

    step = fz.accumulate(fz.train_step(fn, fz.sgd(0.1)), 2)
    state, inputs = step.init(params), scenarios.vector_batches(1)[0]
    batch = Batch(step, state, inputs, None, 0)
    for run, cotangent in batch:
        run.pull(cotangent)
        order.append("pullback")
    assert order == ["forward", "pullback"] * 2
    assert_trees_close(batch.loss()["loss"], loss(params, *inputs), rtol=1e-12)
