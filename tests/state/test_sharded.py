"""A sharded tree is a pytree of this rank's buffers: arithmetic on it is that on the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
import pytest
import scenarios
import torch
import torch.utils._pytree as torch_pytree

import fzero as fz
from fzero.base import pytree
from fzero.state.sharded import Draw
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks


def test_a_map_over_shards_is_one_over_the_whole() -> None:
    loss, params = scenarios.stack(width=24)

    def rank_main(rank: int) -> None:
        tree: Any = fz.shard_zero3(fz.train_step(loss, fz.sgd(0.1))).init(params).params
        doubled = optree.tree_map(lambda x: 2 * x, tree)
        assert_trees_close(fz.gather(doubled), optree.tree_map(lambda x: 2 * x, params))
        assert_trees_equal(fz.gather(torch_pytree.tree_map(torch.clone, tree)), fz.gather(tree))
        assert sum(x.numel() for x in optree.tree_leaves(tree)) < sum(x.numel() for x in optree.tree_leaves(params))

    run_ranks(rank_main, 3)


@pytest.mark.parametrize("policy", [None, fz.Policy.compact16("4-bit"), fz.Policy.exact()])
@pytest.mark.parametrize("ranks", [1, 3])
def test_it_is_a_mapping_from_paths_to_slices(policy: Any, ranks: int) -> None:
    loss, params = scenarios.stack(width=7, dtype=torch.float32)

    def rank_main(rank: int) -> Any:
        step = fz.freeze(fz.train_step(loss, fz.adamw(0.1), policy), "blocks.0.*")
        step = fz.shard_zero3(step) if ranks > 1 else step
        state = step.init(params)
        mu = state.moments.mu
        assert isinstance(state.params, Mapping) and len(state.params) == len(optree.tree_leaves(params))
        assert list(state.params) == [row.path for row in state.layout.rows] == list(state.params.keys())
        assert 0 < len(mu) < len(state.params) and all(path in state.params for path in mu)
        assert "blocks.0.w" not in mu and "none" not in mu and mu.get("none") is None
        assert state.params == state.params and state.params != mu and hash(mu) != hash(state.params)
        return {path: (piece, state.params[path]) for path, piece in dict(state.params).items()}

    slices = run_ranks(rank_main, ranks)
    state = fz.train_step(loss, fz.adamw(0.1), policy).init(params)
    names, full, _ = pytree.named_leaves(fz.gather(state.params))
    for name, leaf in zip(names, full, strict=True):
        for number in (0, 1):
            assert torch.equal(torch.cat([own[name][number] for own in slices]), leaf.reshape(-1))


def test_every_leaf_seed_and_update_has_a_number_of_its_own() -> None:
    layout = fz.plan(fz.train_step(lambda p: p, fz.sgd(0.1)), {"a": torch.ones(2), "b": torch.ones(3)}).layout
    (key,) = layout.groups
    drawn = [Draw(seed, count).counters(layout, key, 0).runs for seed in (0, 1) for count in (0, 1)]
    starts = [start for runs in drawn for _, start, _ in runs]
    assert len(set(starts)) == len(starts) == 8 and all(-(2**31) <= start < 2**31 for start in starts)
    assert Draw(3, 5, frozenset({"blocks.0"})).counters(layout, key, 0) == Draw(3, 5).counters(layout, key, 0)
