"""fz.remat: the same numbers, and only what recomputes."""

from __future__ import annotations

import functools
from typing import Any

import exactness
import pytest
import torch

import fzero as fz
from fzero.testing import LiveBytes, run_ranks


@pytest.mark.parametrize("stage", [0, 3])
def test_activations_of_one_unit_live_at_a_time(stage: int) -> None:
    """The peak of a pullback grows by a block's input only, not by what it computes in between."""

    def peak(blocks: int, remat: bool) -> int:
        def block(p: Any, x: torch.Tensor) -> torch.Tensor:
            for _ in range(8):
                x = torch.tanh(x * p["w"])
            return x

        unit = fz.unit(block)
        loss = lambda p, x: functools.reduce(lambda x, q: unit(q, x), p["blocks"], x).sum()
        params = {"blocks": [{"w": torch.ones(1)} for _ in range(blocks)]}

        def rank_main(rank: int) -> int:
            step = exactness.SHARDS[stage](fz.train_step(loss, fz.sgd(0.1)))
            step = fz.remat(step) if remat else step
            state, x = step.init(params), torch.ones(10_000)
            with LiveBytes() as live:
                step.vjp(state, x, argnums=())[1](torch.ones(()))
            return live.peak

        return run_ranks(rank_main, 1)[0]

    assert peak(8, True) - peak(4, True) < 1.5 * (4 * 40_000)
    assert peak(8, False) - peak(4, False) > 7 * (4 * 40_000)
