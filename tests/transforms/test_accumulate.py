"""fz.accumulate: a batch in parts, with the same numbers."""

from __future__ import annotations

import functools

import exactness
import pytest
import scenarios
import torch

import fzero as fz

F64 = torch.float64


def test_what_every_transform_owes() -> None:
    exactness.owes(functools.partial(fz.accumulate, count=2))
    exactness.refuses_what_is_no_step(functools.partial(fz.accumulate, count=2))


def test_any_order_with_a_sharding_gives_the_same_bits() -> None:
    exactness.same_in_any_order(functools.partial(fz.accumulate, count=2), fz.shard_zero2)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_any_count_gives_the_same_numbers(count: int) -> None:
    exactness.check("unit", [("it", functools.partial(fz.accumulate, count=count))], 1)


def test_a_batch_that_does_not_divide_is_refused_by_input() -> None:
    loss, params = scenarios.stack()
    step = fz.accumulate(fz.train_step(loss, fz.sgd(0.1)), 3)
    with pytest.raises(ValueError, match=r"input 0 has shape \(4, 5\), expected dim 0 to divide into 3"):
        step(step.init(params), *scenarios.vector_batches(1)[0])
