"""Sums of squares of leaves: the same for buffers of any size, whatever lies between the leaves."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero as fz
from fzero.state import squares
from fzero.testing import run_ranks

SHAPES = st.lists(st.sampled_from([(), (1,), (5,), (63,), (64,), (7, 9), (40, 50), (200, 100)]), min_size=1, max_size=5)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])


@given(st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=3), st.integers(1, 3), st.booleans())
def test_are_those_of_each_leaf(
    units: list[tuple[list[tuple[int, ...]], torch.dtype]], ranks: int, sharded: bool
) -> None:
    draw = torch.Generator().manual_seed(0)
    params = {
        f"unit{i}": {f"w{k}": torch.randn(shape, generator=draw).to(dtype) for k, shape in enumerate(shapes)}
        for i, (shapes, dtype) in enumerate(units)
    }

    def rank_main(rank: int) -> None:
        step = fz.train_step(lambda p, x: x.sum(), fz.sgd(0.1), units="unit*")
        state = (fz.shard_zero3(step) if sharded else step).init(params)
        tree = state.params
        for key in tree.groups:  # as torch's own tree_map leaves it
            for gap in tree.layout.gaps(key, tree.rank_of(key), tree.local(key)):
                gap.fill_(3.0)
        found = squares.over_ranks(squares.squares_of(tree), tree)
        want = [x.double().square().sum() for unit in params.values() for x in unit.values()]
        torch.testing.assert_close(found, torch.stack(want), rtol=1e-8, atol=0.0)

    run_ranks(rank_main, ranks)
