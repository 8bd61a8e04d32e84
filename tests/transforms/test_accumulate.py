"""fz.accumulate: a batch in parts, with the same numbers."""

from __future__ import annotations

import functools

import exactness
import pytest
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
