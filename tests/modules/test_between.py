"""Drawn programs between a column and a row, in units and outside of them: one process's values, or a refusal."""

from __future__ import annotations

import collections
import random

import between
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_day


@pytest.mark.filterwarnings("ignore:std..:UserWarning", "ignore:Tensor.mT is deprecated:UserWarning")
@by_day(25)  # `make soak` draws more
@given(st.integers(0, 10**9))
def test_programs_are_equal_to_one_process_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    lines, how = between.drawn(rng), between.arrangement(rng)
    says = between.compared(lines, seed, *how)
    assert not says.startswith("WRONG"), (seed, lines, how, says)


def test_programs_that_are_equal_are_drawn() -> None:
    said = collections.Counter[str]()
    for seed in range(40):
        rng = random.Random(seed)
        said[between.compared(between.drawn(rng), seed, *between.arrangement(rng))] += 1
        if min(said["equal"], said["refused"]) == 4:
            return
    raise AssertionError(said)
