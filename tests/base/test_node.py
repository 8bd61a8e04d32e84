"""A node of whatever differentiates it: the same derivatives as the function itself, in any order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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


Run = Callable[..., Any]  # a function and tensors -> its outputs, as one node or not


def plainly(fn: Any, *tensors: torch.Tensor) -> Any:
    return fn(*tensors)


def as_a_node(fn: Any, *tensors: torch.Tensor) -> Any:
    return apply(Op(fn, None, "cpu"), active(tensors), *tensors)


def complex_inputs(run: Run, x: torch.Tensor) -> torch.Tensor:
    return run(lambda c: (torch.fft.ifft(c * c).real.sin(),), torch.fft.fft(x))[0].sum()


def integer_outputs(run: Run, x: torch.Tensor) -> torch.Tensor:
    y, place = run(lambda x: (x * x, (x > 0).sum()), x)
    return (y * (1 + place)).sum()


def no_outputs(run: Run, x: torch.Tensor) -> torch.Tensor:
    assert run(lambda x: (), x) == ()
    return x.sin().sum()


def unused_and_infinite(run: Run, x: torch.Tensor) -> torch.Tensor:
    return run(lambda x, q: (torch.tanh(x),), x, (x - x).sqrt())[0].sum()


def not_of_what_is_mapped(run: Run, x: torch.Tensor) -> torch.Tensor:
    y, z = run(lambda x, w: (x * w, w.sum() * torch.ones(2, dtype=w.dtype)), x, X.exp())
    return (y * z * x).sum()


def alone(run: Run, x: torch.Tensor) -> torch.Tensor:
    return run(lambda x: (x.detach(), x.sin()), x)[0].sum() + x.sum()


@pytest.mark.parametrize(
    "fn", [complex_inputs, integer_outputs, no_outputs, unused_and_infinite, not_of_what_is_mapped, alone]
)
def test_every_derivative_of_what_people_write(fn: Callable[[Run, torch.Tensor], torch.Tensor]) -> None:
    f = torch.func
    along = lambda g: lambda x: f.jvp(g, (x,), (x.cos(),))[1]
    several = torch.stack([X, X + 1])
    for transform, x in (
        (f.grad, X),
        (along, X),
        (f.hessian, X),
        (lambda g: along(f.grad(g)), X),
        (lambda g: f.grad(along(g)), X),
        (lambda g: f.vmap(f.grad(g)), several),
        (lambda g: f.vmap(along(g)), several),
        (lambda g: along(f.vmap(f.grad(g))), several),
        (lambda g: f.jacrev(f.vmap(f.grad(g))), several),
    ):
        got, expected = (transform(functools.partial(fn, run))(x) for run in (as_a_node, plainly))
        torch.testing.assert_close(got, expected, equal_nan=False)


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
