"""Learning rates by the number of applied updates."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import fzero as fz

F64 = torch.float64


def test_schedules_count_applied_updates() -> None:
    schedule = fz.warmup_cosine(1.0, warmup=4, total=12, end=0.1)
    rates = [schedule(count) for count in range(14)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[11] == pytest.approx(0.1) == rates[13]
    assert all(a > b for a, b in itertools.pairwise(rates[3:12]))
    step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(schedule))
    state = step.init({"w": torch.zeros(1, dtype=F64)})
    for x, lr in ((1.0, 0.25), (float("nan"), 0.5), (1.0, 0.5), (1.0, 0.75)):
        before = state
        state, metrics = step(state, torch.full((1,), x, dtype=F64))
        assert metrics["lr"].item() == pytest.approx(lr)
        assert bool(metrics["skipped"]) == (x != x) == (state.step == before.step)
    with pytest.raises(ValueError, match=r"warmup=5, total=3"):
        fz.warmup_cosine(1.0, 5, 3)
    assert fz.constant(0.5)(7) == 0.5 and fz.linear(0.0, 1.0, 4)(2) == 0.5 and fz.linear(0.0, 1.0, 4)(9) == 1.0


@pytest.mark.parametrize("make", [fz.sgd, fz.adamw, fz.lion, fz.lamb, fz.muon, fz.adafactor])
def test_a_rate_that_is_no_number_is_refused(make: Any) -> None:
    for nan in (float("nan"), torch.tensor(float("nan"))):
        with pytest.raises(ValueError, match=rf"{make.__name__}: got lr=nan, expected a number"):
            make(nan)
    step = fz.train_step(lambda p, x: (p["w"] * x).sum(), make(lambda count: 0.1 if count < 1 else float("nan")))
    state, _ = step(step.init({"w": torch.ones(2, 2)}), torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"the optimizer: got lr=nan"):
        step(state, torch.ones(2, 2))


@pytest.mark.parametrize(
    "schedule", [fz.linear(1e-2, 1e-3, 3), fz.warmup_cosine(1e-2, 2, 5), fz.warmup_cosine(1e-2, 0, 3)]
)
def test_schedules_in_a_function_that_is_one_graph(schedule: Any) -> None:
    step = fz.train_step(lambda p, x: (p["w"] * x).square().sum(), fz.adamw(schedule))
    state = step.init({"w": torch.ones(3, dtype=F64)})
    fast = fz.jit(lambda state, x: step(state, x)[0], backend="graph")
    plain = state
    for i in range(7):
        x = torch.full((3,), 1.0 + i, dtype=F64)
        state, plain = fast(state, x), step(plain, x)[0]
        torch.testing.assert_close(state.params["w"], plain.params["w"], rtol=1e-12, atol=0.0)
    assert fast.traces == 1
