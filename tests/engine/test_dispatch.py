"""A unit's call is a node where its leaves are to be gathered, and a plain call elsewhere."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from units import X, params_of

import fzero as fz
from fzero.testing import run_ranks


@pytest.mark.parametrize("shard", [lambda step: step, fz.remat, fz.shard_zero3])
def test_leaves_of_two_units_that_autocast_has_in_two_dtypes(shard: Any) -> None:
    unit: Any = fz.unit(lambda q, r, x: x @ q["w"] @ r["w"])

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        return unit(*p["blocks"], x).float().sum()

    def rank_main(rank: int) -> None:
        params = torch.utils._pytree.tree_map(lambda x: x.float(), params_of())  # type: ignore[attr-defined]
        step = shard(fz.autocast(fz.train_step(fn, fz.sgd(0.1)), pattern="blocks.0.*"))
        with pytest.raises(ValueError, match=r"leaves of unit 'blocks.0', unit 'blocks.1'.*expected one dtype"):
            step(step.init(params), X.float())

    run_ranks(rank_main, 1)


class Twice(torch.nn.Module):
    """Has a target of another unit, computed in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            target = self.blocks[1](x)
        return (self.blocks[0](x) - target.clone()).square().mean()


@pytest.mark.parametrize("transform", [lambda step: step, fz.fuse_update, fz.shard_zero1, fz.remat])
def test_a_unit_of_a_module_in_inference_mode(transform: Callable[[fz.Step], fz.Step]) -> None:
    module, x = Twice(), torch.linspace(0, 1, 12).reshape(3, 4)
    expected = module(x)
    expected.backward()
    apply, params = fz.functional(module)

    def rank_main(rank: int) -> tuple[float, torch.Tensor]:
        step = transform(fz.train_step(apply, fz.sgd(1.0)))
        state = step.init(params)
        new, metrics = step(state, x)
        old, name = step.init(params), "blocks.0.weight"
        return metrics["loss"].item(), fz.gather(old.params)[name] - fz.gather(new.params)[name]

    for loss, change in run_ranks(rank_main, 2 if transform is fz.shard_zero1 else 1):
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        torch.testing.assert_close(change, module.blocks[0].weight.grad, rtol=1e-4, atol=1e-6)


def test_inference_mode_outside_of_units() -> None:
    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            target = torch.nn.functional.linear(x, p["w"], p["b"])
        return (x @ p["w"] - target.clone()).square().mean()

    step = fz.train_step(loss, fz.sgd(0.1))
    state = step.init({"w": torch.ones(3, 3), "b": torch.ones(3)})
    assert step(state, torch.ones(2, 3))[1]["loss"] == 1.0
    step.vjp(state, torch.ones(2, 3))
    x = torch.ones(2, 3)
    with pytest.raises(TypeError, match=r"refuses of what is differentiated \(in 'loss', .*torch.no_grad"):
        torch.func.grad(lambda x: step.forward(state, x))(x)


def test_a_size_is_given_as_it_is() -> None:
    importlib.import_module("torch._dynamo")  # which has torch make sizes again as tuples

    def body(p: Any, x: torch.Tensor, size: torch.Size) -> torch.Tensor:
        assert type(size) is torch.Size
        return (x @ p["w"]).reshape(size.numel())

    unit = fz.unit(body)
    step = fz.remat(fz.train_step(lambda p, x: unit(p["blocks"][0], x, x.shape).sum(), fz.sgd(0.1)))
    x = torch.ones(2, 3)
    _, metrics = step(step.init({"blocks": [{"w": torch.ones(3, 3)}]}), x)
    assert metrics["loss"] == 18.0
