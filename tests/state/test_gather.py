"""fz.gather gives full tensors, new ones, whatever tree holds the sharded ones."""

from __future__ import annotations

import pytest
import scenarios
import torch

import fzero as fz
from fzero.testing import assert_trees_equal, run_ranks


@pytest.mark.parametrize("policy", [None, fz.Policy.exact()])
def test_every_rank_gets_all_leaves(policy: fz.Policy | None) -> None:
    loss, params = scenarios.stack(dtype=torch.float32)

    def rank_main(rank: int) -> None:
        state = fz.shard_zero3(fz.train_step(loss, fz.adamw(0.1), policy)).init(params)
        found = fz.gather({"here": state.params, "beside": 3})
        assert_trees_equal(found["here"], params)
        assert found["beside"] == 3
        found["here"]["head"]["w"].zero_()
        assert_trees_equal(fz.gather(state.params), params)

    run_ranks(rank_main, 3)


def test_trees_without_shards_are_refused() -> None:
    state = fz.train_step(lambda p: p, fz.sgd(0.1)).init({"w": torch.ones(1)})
    for tree, words in ((state, "holds a whole state"), ({"w": torch.ones(1)}, "no tree is sharded")):
        with pytest.raises(TypeError, match=words):
            fz.gather(tree)
