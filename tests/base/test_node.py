"""A node of whatever differentiates it: the same derivatives as the function itself, in any order."""

from __future__ import annotations

import pytest
import torch

from fzero.base.node import Op, active, apply, gradients, joint_outputs, pulled, refuse_foreign_leaves

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


def test_what_a_function_does_not_depend_on_has_no_cotangent() -> None:
    used, unused = pulled(lambda x, y: (x * x,), [X, X], [torch.ones_like(X)])
    assert used is not None and torch.equal(used, 2 * X) and unused is None


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, requires_grad=True)


def test_what_is_not_used_has_no_gradient() -> None:
    x, unused = leaf(2.0), leaf(3.0)
    out = [x * x, torch.ones(1)]
    assert [g if g is None else g.item() for g in gradients(out, [x, unused], [torch.ones(1)] * 2, False)] == [
        4.0,
        None,
    ]
    assert gradients(out, [x], [None, None], False) == [None]


def test_a_leaf_that_is_closed_over_is_refused() -> None:
    x, foreign = leaf(1.0), leaf(2.0)
    refuse_foreign_leaves([x * 2], [x])
    refuse_foreign_leaves([x * foreign], [x], is_foreign=lambda found: found is not foreign)
    with pytest.raises(ValueError, match=r"closes over a tensor of shape \(1,\)"):
        refuse_foreign_leaves([x * foreign], [x])


def test_outputs_that_depend_on_one_another() -> None:
    x = leaf(1.0)
    y = x.exp()
    assert joint_outputs([y, y * 2, x.sin()]) == {0: frozenset({1})}
