"""A state from params: copies, laid out anew, and the same on every rank."""

from __future__ import annotations

import pytest
import torch

import fzero as fz
from fzero.testing import assert_trees_equal, run_ranks


def build() -> fz.Step:
    return fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))


def test_params_are_copied_and_may_be_made_by_functions() -> None:
    w = torch.ones(3)
    state = build().init({"w": w})
    w.zero_()
    assert_trees_equal(fz.gather(state.params)["w"], torch.ones(3))
    assert_trees_equal(fz.gather(build().init({"w": lambda: torch.ones(3)}).params)["w"], torch.ones(3))


def test_ranks_with_other_params_are_told_or_take_those_of_rank_0() -> None:
    def rank_main(rank: int) -> torch.Tensor:
        step, params = fz.shard_zero3(build()), {"w": torch.full((3,), float(rank))}
        with pytest.raises(ValueError, match=r"The params differ between the ranks.*sync=True"):
            step.init(params)
        return fz.gather(step.init(params, sync=True).params)["w"]

    for found in run_ranks(rank_main, 2):
        assert not found.any()
