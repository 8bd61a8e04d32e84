"""States that begin by values of leaves: refused in a plan, whose leaves have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fzero as fz

SHAPES = {"w": (40, 30), "u": (3, 30), "b": (30,)}


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return ((x @ p["w"] + p["b"]) @ p["u"].T).square().mean()


def params(device: str = "cpu") -> dict[str, torch.Tensor]:
    return {name: torch.ones(shape, device=device) for name, shape in SHAPES.items()}


def by_value(given: Any) -> Any:
    return {path: torch.zeros_like(p) if float(p.norm()) >= 0 else None for path, p in given.items()}


OPTIMIZERS: dict[str, Any] = {
    "adafactor": lambda: fz.from_torch(torch.optim.Adafactor, 0.01),
    "by hand": lambda: fz.GradientTransformation(by_value, lambda g, s, p: (g, s)),
    "elementwise": lambda: fz.GradientTransformation(by_value, lambda g, s, p: (g, s), elementwise=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_leaf_at_a_time(name: str) -> None:
    step = fz.train_step(loss, OPTIMIZERS[name]())
    with pytest.raises(Exception, match="meta") as caught:
        fz.plan(step, params("meta"))
    by = "elementwise" if name == "elementwise" else "whole"
    said = f"init of leaf 'b', by fz.{by}. A plan has leaves without values: write an init that needs only shapes"
    assert any(said in note for note in caught.value.__notes__)
    step.init(params())
