"""fz.plot_plan: one bar for each plan, as long as its bytes a parameter."""

from __future__ import annotations

import pytest
import torch

import fzero as fz

PARAMS = {"w": torch.empty(64, 64, device="meta")}


def test_bars_are_the_bytes_of_a_parameter() -> None:
    plans = {
        name: fz.plan(fz.train_step(lambda p: p, fz.adamw(1e-3), policy), PARAMS)
        for name, policy in (("fp32", None), ("bf16", fz.Policy.bf16_states()))
    }
    axes = fz.plot_plan(plans)
    widths = sorted(patch.get_width() for patch in axes.patches)  # type: ignore[attr-defined]
    assert len(widths) == 6
    assert max(widths) == pytest.approx(8.0)  # the moments of float32
    with pytest.raises(ValueError, match="got no plans"):
        fz.plot_plan({})
