"""The norm of all gradients: over trees, groups and ranks, without loss scale."""

from __future__ import annotations

import pytest
import scenarios
import torch

import fzero as fz
from fzero.testing import run_ranks


def test_over_several_trees_of_tensors() -> None:
    assert fz.global_norm({"a": torch.tensor([3.0])}, [torch.tensor([4.0])]).item() == 5.0
    with pytest.raises(TypeError, match="global_norm: got"):
        fz.global_norm({"a": "text"})


@pytest.mark.parametrize("shard", [fz.shard_zero1, fz.shard_zero2, fz.shard_zero3])
def test_of_shards_it_is_that_of_the_whole(shard: object) -> None:
    loss, params = scenarios.stack()

    def rank_main(rank: int) -> tuple[float, float]:
        step = fz.loss_scale(shard(fz.train_step(loss, fz.sgd(0.1))), 64.0)  # type: ignore[operator]
        state = step.init(params)
        grads, _ = step.vjp(state, *scenarios.vector_batches(2)[rank])[1](torch.ones((), dtype=torch.float64))
        return fz.global_norm(grads).item(), fz.global_norm(fz.gather(grads)).item()

    for sharded, whole in run_ranks(rank_main, 2):
        assert sharded == pytest.approx(whole, rel=1e-12)
