"""fz.plan counts bytes without memory, and says them leaf by leaf."""

from __future__ import annotations

import pytest
import torch

import fzero as fz

PARAMS = {"w": torch.empty(1 << 10, 1 << 10, device="meta"), "b": torch.empty(1 << 10, device="meta")}


def test_bytes_of_params_and_moments_over_ranks() -> None:
    step = fz.train_step(lambda p: p, fz.adamw(0.1))
    alone, shared = fz.plan(step, PARAMS), fz.plan(fz.shard_zero3(step), PARAMS, world_size=4)
    numel = (1 << 20) + (1 << 10)
    assert (alone.params, alone.moments) == (4 * numel, 8 * numel)
    assert (shared.params, shared.moments) == (numel, 2 * numel)
    assert [row.path for row in shared.rows] == ["b", "w"] and "w" in str(shared)


def test_frozen_leaves_have_no_moments() -> None:
    plan = fz.plan(fz.freeze(fz.train_step(lambda p: p, fz.adamw(0.1)), "w"), PARAMS)
    assert plan.moments == 8 * (1 << 10) and plan.params == 4 * ((1 << 20) + (1 << 10))


SQUARE = {"w": torch.empty(64, 64, device="meta")}


def test_bars_are_the_bytes_of_a_parameter() -> None:
    plans = {
        name: fz.plan(fz.train_step(lambda p: p, fz.adamw(1e-3), policy), SQUARE)
        for name, policy in (("fp32", None), ("bf16", fz.Policy.bf16_states()))
    }
    axes = fz.plot_plan(plans)
    widths = sorted(patch.get_width() for patch in axes.patches)  # type: ignore[attr-defined]
    assert len(widths) == 6
    assert max(widths) == pytest.approx(8.0)  # the moments of float32
    with pytest.raises(ValueError, match="got no plans"):
        fz.plot_plan({})
