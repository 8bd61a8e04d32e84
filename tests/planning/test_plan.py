"""fz.plan counts bytes without memory, and says them leaf by leaf."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nightly import by_turns, in_turns

import fzero as fz
from fzero.testing import LiveBytes

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


def test_a_batch_norm_in_evaluation_mode_is_planned() -> None:
    """Its operator may write to buffers, which have values."""
    apply, params = fz.functional(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)))
    step = fz.train_step(lambda p, x: apply.eval(p, x).square().mean(), fz.sgd(0.1))
    assert fz.plan(step, params, inputs=(torch.ones(4, 3),)).flops == 2 * 2 * 4 * 3 * 3


@fz.unit
def block(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x @ p["w"])


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for p in params:
        x = block(p, x)
    return x.square().mean()


def taken(step: fz.Step, params: Any, x: torch.Tensor) -> int:
    """The most bytes that are live in a second step."""
    with LiveBytes() as live:
        state, _ = step(step.init(params), x)
        live.reset_peak()
        state, _ = step(state, x)
    return live.peak


WHOLE: dict[str, Any] = {
    "behind": lambda: fz.chain(fz.clip_by_value(1.0), fz.whole(fz.adamw(1e-3))),
    "in front": lambda: fz.chain(fz.whole(fz.adamw(1e-3)), fz.sgd(0.1)),
    "rows clipped": lambda: fz.chain(fz.adaptive_clip(0.1), fz.adamw(1e-3)),
    "muon behind": lambda: fz.chain(fz.clip_by_value(1.0), fz.muon(1e-3)),
    "muon in front": lambda: fz.chain(fz.muon(1e-3), fz.adamw(1e-3)),
}


@in_turns(5)
@pytest.mark.parametrize(("fused", "optimizer"), by_turns([False, True], sorted(WHOLE)))
def test_what_waits_for_whole_leaves_is_of_few_units(fused: bool, optimizer: str) -> None:
    """Beyond what is planned a step takes as much for many units as for few."""
    beyond, unit = list[int](), 64 * 64 * 4
    for count in (4, 12):
        params = [{"w": torch.ones(64, 64) / 64} for _ in range(count)]
        step = fz.train_step(loss, WHOLE[optimizer]())
        step = fz.fuse_update(step) if fused else step
        beyond.append(taken(step, params, torch.ones(1, 64)) - fz.plan(step, params).peak["device"])
    assert beyond[1] <= beyond[0] + 2 * unit


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
