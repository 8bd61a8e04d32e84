"""fz.loss_scale: never seen, kept in the state, and backing off."""

from __future__ import annotations

import functools

import exactness
import torch

import fzero as fz

F64 = torch.float64


def test_what_every_transform_owes() -> None:
    exactness.owes(functools.partial(fz.loss_scale, scale=64.0))
    exactness.refuses_what_is_no_step(functools.partial(fz.loss_scale, scale=64.0))


def test_any_order_with_a_sharding_gives_the_same_bits() -> None:
    exactness.same_in_any_order(functools.partial(fz.loss_scale, scale=64.0), fz.shard_zero2)


def test_a_dynamic_scale_grows_and_backs_off() -> None:
    step = fz.loss_scale(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1)), initial=8.0, interval=2)
    state = step.init({"w": torch.ones(2)})
    scales = []
    for x in (1.0, 1.0, 1.0, float("inf"), 1.0):
        state, metrics = step(state, torch.full((2,), x))
        scales.append((float(metrics["loss_scale"]), state.extra["loss_scale"].scale, bool(metrics["skipped"])))
    assert scales == [(8, 8, False), (8, 16, False), (16, 16, False), (16, 8, True), (8, 8, False)]
