"""A loss of one's own over two components computes nothing twice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fzero as fz
from fzero.testing import assert_trees_close

F64 = torch.float64
_lock = threading.Lock()
_flops = [0]


def count(flops: int) -> None:
    with _lock:
        _flops[0] += flops


class Product(torch.autograd.Function):
    """A matrix product that counts its floating-point operations, forward and back, on whatever thread it runs."""

    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        count(2 * x.shape[0] * w.numel())
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: object) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        count(2 * x.shape[0] * w.numel() * sum(ctx.needs_input_grad))
        return (grad @ w.T if ctx.needs_input_grad[0] else None, x.T @ grad if ctx.needs_input_grad[1] else None)


def tower(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(Product.apply(x, p["w"]))  # type: ignore[arg-type]
    return Product.apply(h, p["v"])  # type: ignore[return-value]


PARAMS = {k: torch.randn(6, 6, dtype=F64, generator=torch.Generator().manual_seed(i)) for i, k in enumerate("wv")}
X = torch.randn(8, 6, dtype=F64, generator=torch.Generator().manual_seed(7))
Y = torch.randn(8, 6, dtype=F64, generator=torch.Generator().manual_seed(8))


def contrastive(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Every example with every other: no sum of losses of shares."""
    return torch.nn.functional.cross_entropy(a @ b.T, torch.arange(len(a)))


def build(rank: int) -> Any:
    return fz.shard_zero1(fz.train_step(tower, fz.sgd(0.1))), PARAMS


def by_components(halves: bool) -> Any:
    with fz.remote(build, ranks=2, on="threads") as one, fz.remote(build, ranks=2, on="threads") as two:
        states = one.init(), two.init()
        outs, pullbacks = zip(one.vjp(states[0], X), two.vjp(states[1], Y), strict=True)
        leaves = [x.requires_grad_() for x in fz.fetch(list(outs))]
        cotangents = torch.autograd.grad(contrastive(*leaves), leaves)
        found = []
        for pullback, cotangent in zip(pullbacks, cotangents, strict=True):
            inputs = pullback.inputs(cotangent) if halves else None
            grads = pullback.params() if halves else pullback(cotangent)[0]
            found.append(fz.gather(grads))
            fz.fetch(inputs)
        return found


def by_torch() -> Any:
    own = [{k: v.clone().requires_grad_() for k, v in PARAMS.items()} for _ in range(2)]
    xs = [x.clone().requires_grad_() for x in (X, Y)]
    contrastive(*[tower(p, x) for p, x in zip(own, xs, strict=True)]).backward()
    return [{k: v.grad for k, v in p.items()} for p in own]


def counted(run: Callable[[], Any]) -> tuple[int, Any]:
    _flops[0] = 0
    out = run()
    return _flops[0], out


@pytest.mark.parametrize("halves", [False, True])
def test_a_loss_over_two_components(halves: bool) -> None:
    want, expected = counted(by_torch)
    got, found = counted(lambda: by_components(halves))
    assert got == want
    assert_trees_close(found, expected, rtol=1e-10)
