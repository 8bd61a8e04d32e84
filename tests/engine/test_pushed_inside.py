"""A unit that pushes tangents of its own by torch.autograd.forward_ad: torch turns that off in a Function's forward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import fzero as fz
from fzero.testing import run_ranks

F64 = torch.float64
W = torch.randn(3, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
X = torch.randn(2, 3, dtype=F64, generator=torch.Generator().manual_seed(1))


def by_levels(p: Any, x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        out, tangent = forward_ad.unpack_dual(torch.tanh(forward_ad.make_dual(x, torch.ones_like(x)) @ p["w"]))
        assert tangent is not None
        return out + tangent


def by_functional(p: Any, x: torch.Tensor) -> torch.Tensor:
    def summed(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ p["w"]).sum()

    jacobian: Any = torch.autograd.functional.jacobian
    return x + jacobian(summed, x, strategy="forward-mode", vectorize=True)


def steps(body: Any, wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
    block = fz.unit(body)
    step = wrap(fz.train_step(lambda p, x: (block(p["blocks"][0], x) ** 2).sum(), fz.sgd(1.0)))
    state = step.init({"blocks": [{"w": W}]})
    found = [step.forward(state, X)]
    for _ in range(2):
        state, metrics = step(state, X)
        found += [metrics["loss"], fz.gather(state.params)["blocks"][0]["w"]]
    return found


def by_torch(body: Any) -> list[torch.Tensor]:
    w, found = W, list[torch.Tensor]()
    for _ in range(2):
        w = w.detach().requires_grad_()
        loss = (body({"w": w}, X) ** 2).sum()
        (grad,) = torch.autograd.grad(loss, w)
        found += [loss.detach(), w := (w - grad).detach()]
    return [found[0], *found]


WRAPS: dict[str, Any] = {
    "remat": fz.remat,
    "offload": lambda step: fz.offload(step, params="host"),
    "both": lambda step: fz.remat(fz.offload(step, params="host")),
}


@pytest.mark.parametrize("body", [by_levels, by_functional])
@pytest.mark.parametrize("how", list(WRAPS))
def test_as_in_torch(body: Any, how: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that offload saves nothing on a CPU
        found = steps(body, WRAPS[how])
    torch.testing.assert_close(found, by_torch(body))


def sharded(_: int) -> list[torch.Tensor]:
    return steps(by_levels, fz.shard_zero3)


def test_on_real_processes() -> None:
    for found in run_ranks(sharded, 2, backend="processes"):
        torch.testing.assert_close(found, by_torch(by_levels))


# ---- torch.func.jvp around a step on ranks whose function has transforms over units


def through(kind: str, wrapped: Callable[[Any], Any]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    block = wrapped(lambda p, x: torch.tanh(x @ p["w"]))

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        inner = lambda x: block(p["blocks"][0], x).pow(2).sum()
        if kind == "vmap":
            return torch.func.vmap(inner)(x).pow(2).sum()
        if kind == "hessian":
            return torch.func.vmap(torch.func.hessian(inner))(x).pow(2).sum()
        return torch.func.jvp(inner, (x,), (torch.ones_like(x),))[1]

    return fn


@pytest.mark.parametrize("kind", ["vmap", "hessian", "jvp"])
def test_params_are_pushed_through_transforms_over_units(kind: str) -> None:
    def rank_main(_: int) -> torch.Tensor:
        step = fz.shard_zero3(fz.train_step(through(kind, fz.unit), fz.sgd(0.1)))
        loss = lambda w: step.forward(step.init({"blocks": [{"w": w}]}), X)
        return torch.func.jvp(loss, (W,), (torch.ones_like(W),))[1]

    loss = lambda w: through(kind, lambda fn: fn)({"blocks": [{"w": w}]}, X)
    want = torch.func.jvp(loss, (W,), (torch.ones_like(W),))[1]
    for found in run_ranks(rank_main, 2):
        torch.testing.assert_close(found, want)


# ---- a unit that differentiates by its input, under a derivative of a derivative


def by_a_leaf(p: Any, x: torch.Tensor) -> torch.Tensor:
    z = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(torch.tanh(z @ p["w"]).pow(2).sum(), z, create_graph=True)
    return x - 0.1 * g


def by_a_transform(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x - 0.1 * torch.func.grad(lambda z: torch.tanh(z @ p["w"]).pow(2).sum())(x)


def test_a_leaf_of_the_units_own_is_told_what_to_do() -> None:
    w = W.clone().requires_grad_()
    (grad,) = torch.autograd.grad((by_a_leaf({"w": w}, X) ** 3).sum(), w, create_graph=True)
    (want,) = torch.autograd.grad((grad * grad.detach()).sum(), w)
    for body in (by_a_leaf, by_a_transform):
        block = fz.unit(body)
        step = fz.remat(fz.train_step(lambda p, x, block=block: (block(p["blocks"][0], x) ** 3).sum(), fz.sgd(1.0)))
        state = step.init({"blocks": [{"w": W}]})
        v, _ = step.vjp(state, X)[1](torch.ones((), dtype=F64))
        if body is by_a_leaf:
            with pytest.raises(ValueError, match=r"If the unit makes it itself.*use torch.func.grad there"):
                fz.hvp(step, state, v, X)
            continue
        found = fz.gather(fz.hvp(step, state, v, X))["blocks"][0]["w"]
        torch.testing.assert_close(found, want)


def test_a_tangent_from_outside_meets_a_recomputed_unit_by_name() -> None:
    """What torch says of it names no unit, no line and nothing to write instead."""

    @fz.unit
    def block(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ p["w"])

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            x = block(q, x)
        return x.square().mean()

    step, params, x = fz.train_step(fn, fz.sgd(0.1)), {"blocks": [{"w": torch.eye(3)}]}, torch.ones(2, 3)
    pushed, again = [], fz.remat(step)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        pushed.append(forward_ad.unpack_dual(step.forward(step.init(params), dual)).tangent)
        with pytest.raises(TypeError, match=r"in 'fn', test_pushed_inside.py, line \d+\).* Take torch.func.jvp"):
            again.forward(again.init(params), dual)
    state = again.init(params)
    pushed.append(torch.func.jvp(lambda x: again.forward(state, x), (x,), (torch.ones_like(x),))[1])
    fz.testing.assert_trees_close(*pushed)
