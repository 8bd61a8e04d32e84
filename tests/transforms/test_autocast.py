"""fz.autocast: float64 stays as it is; matrices and the function compute in the dtype."""

from __future__ import annotations

from typing import Any

import exactness
import pytest
import torch

import fzero as fz
from fzero.testing import run_ranks

F64 = torch.float64


def test_what_every_transform_owes() -> None:
    exactness.owes(fz.autocast)
    exactness.refuses_what_is_no_step(fz.autocast)


def test_any_order_with_a_sharding_gives_the_same_bits() -> None:
    exactness.same_in_any_order(fz.autocast, fz.shard_zero2)


def test_matrices_are_cast_and_vectors_are_not() -> None:
    step = fz.autocast(fz.train_step(lambda p, x: x, fz.sgd(0.1)))
    leaves = [("w", (2, 2), torch.float32), ("b", (2,), torch.float32), ("d", (2, 2), F64)]
    assert [row.policy.compute for row in step.rows(leaves)] == [torch.bfloat16, torch.float32, F64]
    assert all(row.autocast == torch.bfloat16 for row in step.rows(leaves))


def test_two_dtypes_for_one_leaf_are_refused() -> None:
    step = fz.autocast(fz.train_step(lambda p, x: x, fz.sgd(0.1)), torch.bfloat16)
    with pytest.raises(ValueError, match=r"set twice: by autocast\(torch.bfloat16\) and by autocast\(torch.float16\)"):
        fz.autocast(step, torch.float16)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_callers_own_autocast_stays(stage: int) -> None:
    """Around a step that says nothing of it, as around any function."""
    seen: list[torch.dtype] = []

    def block(p: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append((x @ p["w"]).dtype)
        return (x @ p["w"]).float()

    unit = fz.unit(block)
    params = {"blocks": [{"w": torch.ones(2, 2)}], "head": torch.ones(2, 2)}

    def fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        out = unit(params["blocks"][0], x) @ params["head"]
        seen.append(out.dtype)
        return out.float().mean()

    def rank_main(rank: int) -> None:
        step = exactness.SHARDS[stage](fz.train_step(fn, fz.sgd(0.1)))
        state = step.init(params)
        with torch.autocast("cpu", torch.bfloat16):
            step.forward(state, torch.ones(1, 2))
            step(state, torch.ones(1, 2))

    run_ranks(rank_main, 1)
    assert seen == [torch.bfloat16] * 4
