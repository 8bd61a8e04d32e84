"""Lion by its formula (Chen et al. 2023)."""

from __future__ import annotations

import torch

import fzero as fz
from fzero.testing import assert_trees_close


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_lion_by_its_formula() -> None:
    p, g, m = draw(0, 4), draw(1, 4), draw(2, 4)
    optimizer = fz.lion(0.1, b1=0.9, b2=0.5, weight_decay=0.2)
    state = optimizer.init({"w": p})._replace(mu={"w": m})
    updates, state = optimizer.update({"w": g}, state, {"w": p})
    assert_trees_close(updates["w"], -0.1 * ((0.9 * m + 0.1 * g).sign() + 0.2 * p), rtol=1e-14)
    assert_trees_close(state.mu["w"], 0.5 * m + 0.5 * g, rtol=1e-14)


def test_a_step_has_the_size_of_the_rate_whatever_the_gradient() -> None:
    optimizer = fz.lion(0.1)
    for scale in (1e-8, 1e8):
        grads = {"w": torch.tensor([scale, -scale, 0.0])}
        updates, _ = optimizer.update(grads, optimizer.init(grads), grads)
        assert_trees_close(updates["w"], torch.tensor([-0.1, 0.1, 0.0]))
