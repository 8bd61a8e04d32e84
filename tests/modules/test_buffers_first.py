"""What is said of tensors that a forward writes to leads, followed, to a step that is equal to plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fzero as fz
from fzero.testing import RankError, assert_trees_equal, run_ranks

X = torch.arange(6.0).view(2, 3)


class Averaging(nn.Module):
    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.average: torch.Tensor
        if registered:
            self.register_buffer("average", torch.zeros(3))
        else:
            self.average = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.average.mul_(0.5).add_(x.mean(0))
        return (x * self.gain - self.average).square().sum()


class Observing(nn.Module):
    """Whose buffer has a shape from the first forward on, as an observer's."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.largest = torch.maximum(self.get_buffer("largest"), x.detach().abs().amax(0))
        return (x * self.gain / (self.largest + 1)).square().sum()


def carried(module: nn.Module) -> tuple[Any, Any]:
    apply, params, buffers = fz.functional(module, buffers=True)
    return fz.carry(fz.train_step(apply, fz.sgd(0.1)), buffers), params


@pytest.mark.parametrize("wrap", [lambda step: step, fz.remat], ids=["plain", "remat"])
def test_a_tensor_that_is_no_buffer_yet(wrap: Callable[[Any], Any]) -> None:
    apply, params = fz.functional(nn.Sequential(Averaging(False)))
    step = wrap(fz.train_step(apply, fz.sgd(0.1)))
    with pytest.raises(ValueError, match=r"register_buffer.*functional\(|functional\(.*register_buffer"):
        step(step.init(params), X)
    step, params = carried(nn.Sequential(Averaging(True)))
    step = wrap(step)
    state, _ = step(step.init(params), X)
    plain = Averaging(True)
    plain(X)
    assert_trees_equal(dict(state.extra["carry"]), {"0.average": plain.average})


def test_a_buffer_that_has_its_shape_from_the_first_forward_on() -> None:
    module = Observing()
    step, params = carried(module)
    with pytest.raises(ValueError, match=r"buffer 'largest'.*call the module once before fz\.functional"):
        step(step.init(params), X)
    module(X)
    step, params = carried(module)
    state, metrics = step(step.init(params), 2 * X)
    assert metrics["loss"] == module(2 * X)
    assert_trees_equal(dict(state.extra["carry"]), dict(module.named_buffers()))


def differing(rank: int) -> None:
    step = fz.shard_zero3(fz.train_step(lambda p, x: (x * p["w"]).sum(), fz.sgd(0.1)))
    step.init({"w": torch.full((2,), float(rank))})


@pytest.mark.parametrize(
    ("backend", "advice"), [("threads", "once, outside of ranks that are threads"), ("processes", "Seed every rank")]
)
def test_params_that_differ_between_ranks(backend: str, advice: str) -> None:
    with pytest.raises(RankError, match=rf"{advice}.*sync=True"):
        run_ranks(differing, 2, backend=backend)
