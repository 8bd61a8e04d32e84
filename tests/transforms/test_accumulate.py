"""fz.accumulate: a batch in parts, with the same numbers."""

from __future__ import annotations

import functools

import exactness
import pytest
import torch

import fzero as fz

F64 = torch.float64


@pytest.mark.parametrize("count", [1, 2, 4])
def test_any_count_gives_the_same_numbers(count: int) -> None:
    exactness.check("unit", [("it", functools.partial(fz.accumulate, count=count))], 1)
