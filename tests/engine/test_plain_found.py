"""What autograd finds by itself in runs by plain autograd, held against plain torch: nothing is lost or written to."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

import fzero as fz
from fzero.base import pages
from fzero.engine.passes import Passes

DTYPE = torch.float64


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


def expected(fn: Callable[..., Tensor], params: dict[str, Tensor], x: Tensor, count: int) -> dict[str, Tensor]:
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    for part in x.chunk(count):
        (fn(leaves, part) / count).backward()
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def near(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    for name, grad in right.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-10, atol=1e-12)


HOW = ("backward", "early", "halves")


def pulled(
    fn: Callable[..., Tensor], params: dict[str, Tensor], x: Tensor, count: int, how: str, after: Callable[..., object]
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients, and the input's cotangent, of a step's passes.

    Args:
        after: is called with what is outside of the library between the halves of a pullback.
    """
    step = fz.train_step(fn, fz.sgd(1.0))
    passes, own = Passes(step, step.init(params), count), list[Tensor]()
    for i, part in enumerate(x.chunk(count)):
        output, _ = passes.forward(i, (part,), (0,))
        ct = torch.full_like(output, 1 / count)  # type: ignore[arg-type]
        rest: Callable[[], object] = lambda: None
        if how == "backward":
            (cotangent,) = passes.backward(i, ct)
        elif how == "early":
            (cotangent,), rest = passes.early(i, ct)
        else:
            (cotangent,) = passes.inputs(i, ct)
            rest = functools.partial(passes.params, i)
        assert isinstance(cotangent, Tensor)
        own.append(cotangent.clone())
        after(ct, cotangent, output)
        rest()
    passes.reduce()
    return fz.gather(passes.grads()), torch.cat(own)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("how", ["early", "halves"])
def test_who_writes_to_a_cotangent_between_the_halves_changes_no_gradient(count: int, how: str) -> None:
    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return x @ p["w"] + p["b"]

    def write(*values: Tensor) -> None:
        for each in values:
            each.zero_()

    params, x = {"w": drawn(3, 3), "b": drawn(6 // count, 3, seed=1)}, drawn(6, 3, seed=2)
    right, _ = pulled(fn, params, x, count, "backward", lambda *_: None)
    found, _ = pulled(fn, params, x, count, how, write)
    near(found, right)


@pytest.mark.parametrize("how", ["early", "halves"])
def test_who_gives_up_between_the_halves_leaves_nothing(how: str) -> None:
    step = fz.train_step(lambda p, x: (x @ p["w"]).square().sum(), fz.sgd(1.0))
    passes = Passes(step, step.init({"w": drawn(3, 3)}), 1)
    passes.forward(0, (drawn(6, 3),), (0,))
    run = weakref.ref(passes._runs[0])
    gc.collect()
    gc.disable()
    try:
        left = (passes.early if how == "early" else passes.inputs)(0, torch.ones((), dtype=DTYPE))
        del passes, left
        assert run() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("count", [1, 2])
def test_gaps_between_leaves_are_zeros(how: str, count: int) -> None:
    """Where sums lie in memory that others have left full of large numbers."""
    step = fz.train_step(lambda p, x: (x @ p["w"] @ p["v"]).square().sum(), fz.sgd(1.0))
    full = lambda numel, dtype, device: torch.full((numel,), 1e240, dtype=dtype, device=device)
    with mock.patch.object(pages, "empty", full):
        passes = Passes(step, step.init({"w": drawn(3, 3), "v": drawn(3, 3, seed=1)}), count)
        for i, part in enumerate(drawn(6, 3, seed=2).chunk(count)):
            output, _ = passes.forward(i, (part,), (0,))
            ct = torch.ones_like(output)  # type: ignore[arg-type]
            if how == "early":
                passes.early(i, ct)[1]()
            else:
                (passes.backward if how == "backward" else passes.inputs)(i, ct)
            if how == "halves":
                passes.params(i)
        passes.reduce()
        grads = passes.grads()
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
    near({"w": params["w"] - fz.gather(new.params)["w"]}, expected(fn, params, x, 2))
