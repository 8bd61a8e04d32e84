"""The protocol of optimizers: a pair of functions is enough."""

from __future__ import annotations

import torch

import fzero as fz


def test_a_pair_is_an_optimizer() -> None:
    pair = fz.GradientTransformation(lambda params: (), lambda grads, state, params=None: (grads, state))
    assert pair.fused is None
    step = fz.train_step(lambda p: p["w"].sum(), pair)
    state, _ = step(step.init({"w": torch.ones(2)}))
    assert torch.equal(fz.gather(state.params)["w"], torch.full((2,), 2.0))  # the gradient is added
    assert not pair.by_group and fz.adamw(0.1).by_group
