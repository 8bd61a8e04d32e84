"""What autograd finds by itself in runs by plain autograd, held against plain torch: nothing is lost or written to."""

from __future__ import annotations

import gc
import warnings
import weakref
from unittest import mock

import pytest
import torch
from microbatches import F64, HOW, by_torch, drawn, pulled
from torch import Tensor

import fzero as fz
from fzero.base import pages
from fzero.engine.passes import Passes


def near(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    for name, grad in right.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("how", ["early", "halves"])
def test_who_writes_to_a_cotangent_between_the_halves_changes_no_gradient(count: int, how: str) -> None:
    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return x @ p["w"] + p["b"]

    def write(*values: Tensor) -> None:
        for each in values:
            each.zero_()

    params, x = {"w": drawn(3, 3), "b": drawn(6 // count, 3, seed=1)}, drawn(6, 3, seed=2)
    found = pulled(fn, params, x.chunk(count), how, after=write)
    near(fz.gather(found), by_torch(fn, params, x.chunk(count)))


@pytest.mark.parametrize("how", ["early", "halves"])
def test_who_gives_up_between_the_halves_leaves_nothing(how: str) -> None:
    step = fz.train_step(lambda p, x: (x @ p["w"]).square().sum(), fz.sgd(1.0))
    passes = Passes(step, step.init({"w": drawn(3, 3)}), 1)
    passes.forward(0, (drawn(6, 3),), (0,))
    run = weakref.ref(passes._runs[0])
    gc.collect()
    gc.disable()
    try:
        left = (passes.early if how == "early" else passes.inputs)(0, torch.ones((), dtype=F64))
        del passes, left
        assert run() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("count", [1, 2])
def test_gaps_between_leaves_are_zeros(how: str, count: int) -> None:
    """Where sums lie in memory that others have left full of large numbers."""
    full = lambda numel, dtype, device: torch.full((numel,), 1e240, dtype=dtype, device=device)
    params, parts = {"w": drawn(3, 3), "v": drawn(3, 3, seed=1)}, drawn(6, 3, seed=2).chunk(count)
    with mock.patch.object(pages, "empty", full):
        grads = pulled(lambda p, x: (x @ p["w"] @ p["v"]).square().sum(), params, parts, how)
    for buffer in grads.locals().values():
        assert buffer.abs().max() < 1e6
        assert (buffer != 0).sum() <= 18


def test_a_real_weight_that_is_cast_to_complex() -> None:
    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return (x @ p["w"].to(torch.complex128)).abs().square().mean()

    params, x = {"w": drawn(4, 4)}, torch.complex(drawn(8, 4), drawn(8, 4, seed=1))
    step = fz.accumulate(fz.train_step(fn, fz.sgd(1.0)), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new, _ = step(step.init(params), x)
    near({"w": params["w"] - fz.gather(new.params)["w"]}, by_torch(fn, params, x.chunk(2), 0.5))
