"""Modules that units refer to weakly: a child reads its parent's params, and nothing keeps them alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

X = torch.arange(6.0, dtype=torch.float64).view(2, 3) / 6


class Child(nn.Module):
    def __init__(self, parent: Any, refer: Callable[[Any], Any]) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.parent = [refer(parent)]  # in a list, as a proxy of a module would become a submodule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parent: Any = self.parent[0]() if isinstance(self.parent[0], weakref.ref) else self.parent[0]
        return torch.tanh(self.lin(x) * parent.scale)


class Parent(nn.Module):
    def __init__(self, refer: Callable[[Any], Any]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 0.7))
        self.blocks = nn.ModuleList([Child(self, refer) for _ in range(2)])
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().sum()


@pytest.mark.parametrize("refer", [weakref.ref, weakref.proxy], ids=["ref", "proxy"])
@pytest.mark.parametrize("wrap", [fz.remat, fz.shard_zero3, lambda step: fz.remat(fz.shard_zero3(step))])
def test_a_child_that_refers_to_its_parent(refer: Callable[[Any], Any], wrap: Callable[[Any], Any]) -> None:
    module = Parent(refer)
    apply, params = fz.functional(module)
    module(X).backward()
    want = {name: param.grad for name, param in module.named_parameters()}
    step = wrap(fz.train_step(apply, fz.sgd(0.1)))

    def rank(_: int) -> Any:
        state = step.init(params)
        for _ in range(2):
            grads = step.vjp(state, X)[1](torch.ones((), dtype=torch.float64))[0]
        return dict(fz.gather(grads))

    for found in run_ranks(rank, 2):
        assert_trees_close(found, want, rtol=1e-12, atol=1e-12)


def test_a_unit_keeps_no_module_alive_that_it_refers_to_weakly() -> None:
    module = nn.Linear(3, 3).double()
    refer = weakref.ref(module)
    alive = []

    @fz.unit
    def double(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        alive.append(refer() is not None)
        return x * p["w"]

    step = fz.remat(fz.train_step(lambda p, x: double(p, x).sum(), fz.sgd(0.1)))
    state = step.init({"w": torch.ones(3, dtype=torch.float64)})
    step(state, X)
    assert all(alive)
    del module
    gc.collect()
    alive.clear()
    step(state, X)
    assert alive and not any(alive)
