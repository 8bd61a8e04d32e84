"""fz.loss_scale: never seen, kept in the state, and backing off."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from nightly import in_turns

import fzero as fz


def test_a_dynamic_scale_grows_and_backs_off() -> None:
    step = fz.loss_scale(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1)), initial=8.0, interval=2)
    state = step.init({"w": torch.ones(2)})
    scales = []
    for x in (1.0, 1.0, 1.0, float("inf"), 1.0):
        state, metrics = step(state, torch.full((2,), x))
        scales.append((float(metrics["loss_scale"]), state.extra["loss_scale"].scale, bool(metrics["skipped"])))
    assert scales == [(8, 8, False), (8, 16, False), (16, 16, False), (16, 8, True), (8, 8, False)]


def as_in_deepspeed(
    finite: list[bool], scale: float, window: int, minimum: float, hysteresis: int, consecutive: bool
) -> list[float]:
    """The scales after updates, as DeepSpeed's DynamicLossScaler counts."""
    left, last, out = hysteresis, -1, []
    for number, each in enumerate(finite):
        if not each:
            scale, left, last = (max(scale / 2, minimum), 1, number) if left == 1 else (scale, left - 1, number)
        else:
            left, stable = hysteresis if consecutive else left, number - last - 1
            if stable > 0 and stable % window == 0:
                left, scale = hysteresis, scale * 2
        out.append(scale)
    return out


@in_turns(5)
@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("hysteresis", [1, 2, 4])
def test_hysteresis_is_that_of_deepspeed(interval: int, hysteresis: int, consecutive: bool) -> None:
    draw = random.Random(10 * interval + hysteresis)
    finite = [draw.random() < 0.6 for _ in range(60)]
    cut = draw.randrange(60)
    options: Any = {"hysteresis": hysteresis, "consecutive": consecutive, "late": True}
    step = fz.loss_scale(LINEAR, initial=8.0, interval=interval, minimum=2.0, **options)
    state, scales = step.init({"w": torch.ones(2)}), []
    for number, each in enumerate(finite):
        state = fz.convert(state, fz.donate(step)) if number == cut else state
        state, metrics = step(state, torch.full((2,), 1.0 if each else float("inf")))
        scales.append(state.extra["loss_scale"].scale)
        assert bool(metrics["skipped"]) is not each
    assert scales == as_in_deepspeed(finite, 8.0, interval, 2.0, hysteresis, consecutive)


LINEAR = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))


class OldState(NamedTuple):
    scale: float
    finite: int = 0


def begun(params: object) -> OldState:
    return OldState(32.0, 1)


def kept(value: OldState, params: object, applied: bool) -> OldState:
    return value


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_checkpoints_of_before_there_was_hysteresis_load(tmp_path: Path, hysteresis: int) -> None:
    old = fz.Extra("loss_scale", "loss_scale()", begun, kept, kind="a dynamic loss_scale", expendable=True)
    fz.save(tmp_path, LINEAR.with_state(old).init({"w": torch.ones(2)}))
    step = fz.loss_scale(LINEAR, interval=2, hysteresis=hysteresis)
    state = fz.load(tmp_path, step)
    assert tuple(state.extra["loss_scale"]) == (32.0, 1, 0)
    state, _ = step(state, torch.ones(2))
    assert state.extra["loss_scale"].scale == 64.0


def test_a_hysteresis_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"loss_scale: got hysteresis=0, expected at least 1"):
        fz.loss_scale(LINEAR, hysteresis=0)
