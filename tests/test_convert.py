"""fz.convert: a state goes on in another step, and what would be lost is refused."""

from __future__ import annotations

import pytest
import torch

import fzero as fz
from fzero.testing import assert_trees_equal, run_ranks

PARAMS = {"w": torch.linspace(-1.0, 1.0, 5), "v": torch.linspace(0.1, 3.0, 7)}


def loss(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (p["w"].sum() * x).square().sum() + p["v"].square().sum()


def test_from_one_sharding_to_another_and_back() -> None:
    def rank_main(rank: int) -> None:
        plain = fz.train_step(loss, fz.adamw(0.1))
        first, second = fz.shard_zero1(plain), fz.shard_zero3(plain)
        state, _ = first(first.init(PARAMS), torch.ones(2))
        moved = fz.convert(state, second)
        assert moved.step == 1
        for tree in ("params", "moments"):
            assert_trees_equal(fz.gather(getattr(moved, tree)), fz.gather(getattr(state, tree)))
        assert_trees_equal(fz.gather(fz.convert(moved, first).params), fz.gather(state.params))

    run_ranks(rank_main, 3)


def test_fewer_bits_only_where_it_is_asked_for() -> None:
    step, small = (fz.train_step(loss, fz.adamw(0.1), policy) for policy in (None, fz.Policy.bf16_states()))
    state = step.init(PARAMS)
    with pytest.raises(ValueError, match="lossy=True"):
        fz.convert(state, small)
    assert fz.gather(fz.convert(state, small, lossy=True).params)["w"].dtype == torch.bfloat16


def test_steps_over_other_ranks_are_refused_on_every_rank() -> None:
    def rank_main(rank: int) -> None:
        plain = fz.train_step(loss, fz.adamw(0.1))
        sharded = fz.shard_zero3(plain)
        state = sharded.init(PARAMS)
        with pytest.raises(ValueError, match=r"step: rank 0 got one over ranks \[0, 1\] .*, rank 1 one over one"):
            fz.convert(state, sharded if rank == 0 else plain)
        assert_trees_equal(fz.gather(fz.convert(state, plain).params), PARAMS)  # each of them alone

    run_ranks(rank_main, 2)
