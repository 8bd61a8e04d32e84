"""fz.shard_zero1, 2 and 3: what is cut, gathered and sent."""

from __future__ import annotations

import exactness
import pytest
import scenarios
import torch

import fzero as fz

F64 = torch.float64


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_numbers_stay(stage: int, world: int) -> None:
    for scenario in exactness.SCENARIOS:
        exactness.check(scenario, [("it", exactness.SHARDS[stage])], world)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_row_says_what_is_cut(stage: int) -> None:
    (row,) = exactness.SHARDS[stage](fz.train_step(lambda p, x: x, fz.sgd(0.1))).rows([("w", (2,), F64)])
    assert row.moments is not None and row.grads is not None
    cut = [bool(kept.cuts) for kept in (row.moments, row.grads, row.params)]
    assert cut == [True, stage >= 2, stage == 3]
    assert row.cuts[0].axis == "dp" and row.cuts[0].dim is None
    assert row.lifetime == ("one use" if stage == 3 else "the step") and row.held == (stage < 3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_without_a_process_group_it_says_what_to_start(stage: int) -> None:
    loss, params = scenarios.stack()
    with pytest.raises(RuntimeError, match=f"shard_zero{stage}: there is no process group, and this step is sharded"):
        exactness.SHARDS[stage](fz.train_step(loss, fz.sgd(0.1))).init(params)
