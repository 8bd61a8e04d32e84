"""fz.jit over drawn transforms: the bits of the step without it."""

from __future__ import annotations

from typing import Any

import pytest
import scenarios
from exactness import SCENARIOS, train
from hypothesis import given
from hypothesis import strategies as st

import fzero as fz
from fzero.jit import jit
from fzero.testing import assert_trees_equal, run_ranks, strategies

CHOSEN = strategies.transforms(stages=(0, 1, 2, 3), patterns=scenarios.BLOCKS)


def _jit(step: fz.Step) -> fz.Step:
    return jit(step, "graph")


@given(scenario=st.sampled_from(sorted(SCENARIOS)), chosen=CHOSEN, world=st.integers(1, 3), data=st.data())
def test_the_same_bits(scenario: str, chosen: Any, world: int, data: Any) -> None:
    names = [name for name, _ in chosen]
    if not any("shard" in name for name in names):
        world = 1
    place = data.draw(st.integers(0, len(chosen)))
    both = [*chosen[:place], ("jit", _jit), *chosen[place:]]

    def main(rank: int) -> None:
        want = train(rank, scenario, chosen, world)
        try:
            got = train(rank, scenario, both, world)
        except ValueError as error:
            if not str(error).startswith("jit: got leaf"):
                raise
            assert "offload" in str(error)
            return
        assert_trees_equal(got[0], want[0])
        assert got[1:] == want[1:]

    run_ranks(main, world)


pytestmark = pytest.mark.usefixtures("hazards")
