"""A node of whatever differentiates it: the same derivatives as the function itself, in any order."""

from __future__ import annotations

import torch

from fzero.base.node import Op, active, apply, differentiate

X = torch.tensor([0.3, -1.2], dtype=torch.float64)


def function(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x


def through_a_node(x: torch.Tensor) -> torch.Tensor:
    return apply(Op(lambda x: (function(x),), None, "cpu"), active([x]), x)[0]


def test_derivatives_of_any_order_are_those_of_the_function() -> None:
    f = torch.func
    for transform in (
        lambda fn: f.grad(lambda x: fn(x).sum()),
        lambda fn: lambda x: f.jvp(fn, (x,), (x,))[1],
        lambda fn: f.hessian(lambda x: fn(x).sum()),
        lambda fn: f.vmap(f.grad(fn)),
    ):
        torch.testing.assert_close(transform(through_a_node)(X), transform(function)(X))


def test_plain_autograd_in_a_pullback_that_may_be_repeated() -> None:
    out, pull = differentiate(lambda x, y: (x * x,), [X, X])
    assert not out[0].requires_grad
    for retain in (True, False):
        used, unused = pull([torch.ones_like(X)], retain)
        assert torch.equal(used, 2 * X) and not unused.any()
