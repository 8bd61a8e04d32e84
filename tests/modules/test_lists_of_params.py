"""Params in lists and dicts of their own: nobody calls those, so by default they are no units."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nightly import in_turns
from torch import nn

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

F64 = torch.float64


def drawn(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, max(1, torch.Size(shape).numel()), dtype=F64).reshape(shape))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([drawn(3, 3), drawn(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weights[0] + self.weights[1])


class Of(nn.Module):
    """A list, a dict with numbers for keys, lists in a list, and blocks that have one, which are units."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.ParameterList([drawn(3), drawn(3)])
        self.named = nn.ParameterDict({"0": drawn(3), "x": drawn(3)})
        self.lists = nn.ModuleList([nn.ParameterList([drawn(3)]) for _ in range(2)])
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        x = x * self.e[0] + self.e[1] * self.named["0"] - self.named["x"]
        first, second = [own[0] for own in self.lists if isinstance(own, nn.ParameterList)]
        return (x * first + second).square().mean()


def units_of(step: fz.Step, params: Any) -> set[str]:
    return {row.unit for row in fz.plan(step, params).rows}


@in_turns(2)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda step: fz.remat(fz.shard_zero1(step)),
        fz.shard_zero3,
        lambda step: fz.fuse_update(fz.remat(fz.shard_zero3(step))),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("key", ["", "m", "list"])
def test_a_module_with_params_in_lists(wrap: Any, count: int, key: str) -> None:
    module = Of()
    apply, own = fz.functional(module)
    x = torch.linspace(-2, 1, 12, dtype=F64).reshape(4, 3)
    params: Any = {"": own, "m": {"m": own}, "list": [own]}[key]

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        return apply(p if key == "" else p["m"] if key == "m" else p[0], x)

    def rank_main(rank: int) -> Any:
        step = wrap(fz.train_step(fn, fz.sgd(0.5)))
        state, metrics = step(step.init(params), x.chunk(count)[rank])
        return fz.gather(state.params), metrics["loss"]

    after, loss = run_ranks(rank_main, count)[0]
    right = module(x)
    grads = torch.autograd.grad(right, list(module.parameters()))
    want = {name: p.detach() - 0.5 * g for (name, p), g in zip(module.named_parameters(), grads, strict=True)}
    assert_trees_close(dict(after if key == "" else after["m"] if key == "m" else after[0]), want)
    torch.testing.assert_close(loss, right.detach())


def test_units_that_nobody_calls_are_none() -> None:
    apply, params = fz.functional(Of())
    step = fz.train_step(apply, fz.sgd(0.5))
    assert units_of(step, params) == {"", "blocks.0", "blocks.1"}
    assert units_of(step, dict(params)) > {"e.0", "e.1", "named.0", "lists.0"}  # of which nobody knows that any more
    named = fz.train_step(apply, fz.sgd(0.5), units=["e.*"])
    assert units_of(named, params) == {"", "e.0", "e.1"}
    step = fz.remat(step)
    with pytest.raises(ValueError, match=r"no submodule 'e\.0'.*units=.*which dict\(params\) does not"):
        step(step.init(dict(params)), torch.ones(2, 3, dtype=F64))
