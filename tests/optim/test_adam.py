"""Adam and AdamW: the bias of the first update, and where weight decay goes in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

P, G = torch.tensor([2.0, -3.0]), torch.tensor([1e-3, -50.0])


def first_update(optimizer: fz.GradientTransformation) -> torch.Tensor:
    return optimizer.update({"w": G}, optimizer.init({"w": P}), {"w": P})[0]["w"]


def test_the_first_update_has_the_size_of_the_rate() -> None:
    assert_trees_close(first_update(fz.adam(0.1, eps=0.0)), -0.1 * G.sign(), rtol=1e-6)


def test_weight_decay_is_decoupled_in_adamw_and_part_of_the_gradient_in_adam() -> None:
    assert_trees_close(first_update(fz.adamw(0.1, eps=0.0, weight_decay=0.5)), -0.1 * (G.sign() + 0.5 * P), rtol=1e-6)
    coupled = (G + 0.5 * P).sign()
    assert_trees_close(first_update(fz.adam(0.1, eps=0.0, weight_decay=0.5)), -0.1 * coupled, rtol=1e-6)


def test_a_decay_that_never_ends_is_refused() -> None:
    with pytest.raises(ValueError, match=r"adamw\(b2=\.\.\.\): got 1\.0"):
        fz.adamw(0.1, b2=1.0)


def test_a_schedule_of_the_momentum() -> None:
    """As in torch, where the betas of a group are changed before each step."""
    betas = [0.8, 0.5, 0.9, 0.7]
    generator = torch.Generator().manual_seed(0)
    w, x = torch.randn(5, 3, generator=generator), torch.randn(4, 5, generator=generator)
    makes: list[tuple[Any, Any]] = [(fz.adamw, torch.optim.AdamW), (fz.adam, torch.optim.Adam)]
    for make, theirs in makes:
        leaf = w.clone().requires_grad_()
        own = theirs([leaf], lr=0.1, weight_decay=0.1)
        for b1 in betas:
            own.param_groups[0]["betas"] = (b1, 0.999)
            own.zero_grad()
            (x @ leaf).square().mean().backward()
            own.step()

        def rank_main(rank: int, make: Any = make) -> torch.Tensor:
            made = make(0.1, b1=betas.__getitem__, weight_decay=0.1)
            step = fz.shard_zero3(fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), made))
            state = step.init({"w": w})
            for _ in betas:
                state, _ = step(state, x)
            return fz.gather(state.params)["w"]

        torch.testing.assert_close(run_ranks(rank_main, 2)[0], leaf.detach(), rtol=1e-5, atol=1e-6)
    lion = fz.lion(0.1, b1=betas.__getitem__)
    grads, params = {"w": torch.tensor([1.0, -1.0])}, {"w": torch.zeros(2)}
    updates, state = lion.update(grads, lion.init(params), params)
    updates, _ = lion.update({"w": torch.tensor([-0.02, -1.0])}, state, params)  # 0.5 * 0.01 - 0.5 * 0.02
    assert updates["w"].tolist() == pytest.approx([0.1, 0.1])
