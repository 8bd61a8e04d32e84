"""A node of whatever differentiates it: the same derivatives as the function itself, in any order."""

from __future__ import annotations

import functools
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fzero.base.ambient import Ambient
from fzero.base.node import Op, active, apply, direct, gradients

X = torch.tensor([0.3, -1.2], dtype=torch.float64)


Run = Callable[..., Any]  # a function and tensors -> its outputs, as one node or not


def plainly(fn: Any, *tensors: torch.Tensor) -> Any:
    return fn(*tensors)


def as_a_node(fn: Any, *tensors: torch.Tensor) -> Any:
    return apply(Op(fn, None, Ambient("cpu")), active(tensors), *tensors)


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


def test_what_is_not_used_has_no_gradient() -> None:
    x, unused = (torch.tensor([value], requires_grad=True) for value in (2.0, 3.0))
    found = gradients([x * x, torch.ones(1)], [x, unused], [torch.ones(1)] * 2, False)
    assert found[0] is not None and found[0].item() == 4.0 and found[1] is None
    assert gradients([x * x], [x], [None], False) == [None]


class _Holds(torch.autograd.Function):
    """`apply(held, x)`: copies of x, whose node holds an object."""

    @staticmethod
    def forward(held: object, x: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return x.clone(), x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[object, torch.Tensor], _: object) -> None:
        ctx.held = inputs[0]

    @staticmethod
    def backward(ctx: object, *cotangents: torch.Tensor) -> object:  # type: ignore[override]
        return None, sum(cotangents)


held_by = direct(_Holds)


def test_the_collector_never_goes_on_from_a_tensor_to_its_node() -> None:
    """It would only where nothing else owns either, and another thread may change that between its two looks."""

    def followed(x: torch.Tensor, apply: Any = held_by) -> list[bool]:
        alone = [apply(object(), x)[which] for which in (0, 1)]  # of two outputs, the other is gone
        return [any(reference is y.grad_fn for reference in gc.get_referents(y)) for y in alone]

    plain = torch.ones(2, requires_grad=True)
    assert followed(plain, _Holds.apply) == [True, True]
    assert followed(plain) == [False, False]
    under: list[list[bool]] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        under.append(followed(x))
        return x.sum()

    with torch.no_grad():
        torch.func.vjp(inner, torch.ones(2))  # a single level
    torch.func.vjp(torch.func.grad(inner), torch.ones(2))
    assert under == [[False, False]] * 2


def test_what_a_node_holds_survives_collections_beside_other_threads() -> None:
    """Its weak references too: fails within a second or two where the collector goes on from tensors to nodes."""
    x, big, stop, cleared = torch.ones(1, requires_grad=True), torch.ones(4_000_000), threading.Event(), []

    def use() -> None:
        chance = random.Random(0)
        while not stop.is_set():
            held = Held()
            reference, (y, _) = weakref.ref(held), held_by(held, x)
            del held, _
            y.float_power(big[: chance.randrange(500_000, len(big))])  # comes to own y in the midst of it
            if reference() is None:
                cleared.append(y.grad_fn)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        end = time.monotonic() + 2
        while time.monotonic() < end and not cleared:
            gc.collect()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not cleared


class Held:
    """What can be referred to weakly."""
