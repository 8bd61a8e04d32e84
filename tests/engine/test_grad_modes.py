"""Grad modes of a unit's call: what torch.no_grad takes from a derivative is gone in every way that a unit runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nightly import in_turns
from units import forms

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

F64 = torch.float64
MADE = torch.Generator().manual_seed(0)
W, X = (torch.randn(3, 3, generator=MADE, dtype=F64) for _ in range(2))
WAYS = forms("plain", "remat", "ZeRO-3", "ZeRO-3, remat")


def block(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"])


def loss(call: Callable[..., torch.Tensor], kind: str, p: Any, x: torch.Tensor) -> torch.Tensor:
    own = p["blocks"][0]

    def inside(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            h = call(own, x)
        return (call(own, x) * h + x).square().mean()

    if kind == "grad":
        return torch.func.grad(inside)(x).square().mean()
    if kind == "jvp":
        pair: Any = torch.func.jvp(inside, (x,), (x.sin(),))
        return pair[0] + pair[1]
    if kind == "vmap":
        return torch.func.vmap(inside)(x.unsqueeze(1)).mean()
    return inside(x)


@in_turns(3)
@pytest.mark.parametrize("kind", ["plain", "grad", "jvp", "vmap"])
@pytest.mark.parametrize("way", WAYS)
def test_a_call_under_no_grad(way: str, kind: str) -> None:
    def rank_main(rank: int) -> Any:
        step = WAYS[way](fz.train_step(lambda p, x: loss(fz.unit(block), kind, p, x), fz.sgd(1.0)))
        state = step.init({"blocks": [{"w": W}]})
        for _ in range(2):
            new, _ = step(state, X)
        outputs, pullback = step.vjp(state, X)
        grads, (ct,) = pullback(torch.ones((), dtype=F64))
        return fz.gather(new.params), fz.gather(grads), ct, outputs

    params = {"blocks": [{"w": W}]}
    want, ct = torch.func.grad(lambda p, x: loss(block, kind, p, x), (0, 1))(params, X)
    ((new, grads, own_ct, value),) = run_ranks(rank_main, 1)
    assert_trees_close(grads, want, rtol=1e-10)
    assert_trees_close(new["blocks"][0]["w"], W - want["blocks"][0]["w"], rtol=1e-10)
    torch.testing.assert_close((own_ct, value), (ct, loss(block, kind, params, X)))


@in_turns(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["jvp", "jacfwd", "hessian", "grad"])
def test_a_forward_under_a_transform(way: str, kind: str) -> None:
    """Value and derivative see one grad mode."""

    def both(fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        if kind == "jvp":
            return torch.func.jvp(fn, (X,), (X.cos(),))
        return {"jacfwd": torch.func.jacfwd, "hessian": torch.func.hessian, "grad": torch.func.grad}[kind](fn)(X)

    def rank_main(rank: int) -> Any:
        step = WAYS[way](fz.train_step(lambda p, x: loss(fz.unit(block), "plain", p, x), fz.sgd(1.0)))
        state = step.init({"blocks": [{"w": W}]})
        return both(lambda x: step.forward(state, x))

    params = {"blocks": [{"w": W}]}
    assert_trees_close(run_ranks(rank_main, 1)[0], both(lambda x: loss(block, "plain", params, x)), rtol=1e-10)


def penalised(call: Callable[..., torch.Tensor], p: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    h = x @ p["v"]
    for own in p["blocks"]:
        h = call(own, h)
    (slope,) = torch.autograd.grad(h.sum(), x, create_graph=True)
    return (h + slope).square().mean()


@in_turns(2)
@pytest.mark.parametrize("way", [*WAYS, "names"])
def test_a_penalty_of_a_gradient_outside_of_units(way: str) -> None:
    wrap = {**WAYS, "names": lambda step: fz.remat(step, save=())}[way]
    params = {"blocks": [{"w": W}, {"w": X}], "v": W + X}

    def rank_main(rank: int) -> Any:
        step = wrap(fz.train_step(lambda p, x: penalised(fz.unit(block), p, x), fz.sgd(1.0)))
        state = step.init(params)
        step(state, X)  # which proves it
        return fz.gather(step(state, X)[0].params)

    leaves = [x.clone().requires_grad_() for x in (W, X, W + X)]
    loss = penalised(block, {"blocks": [{"w": x} for x in leaves[:2]], "v": leaves[2]}, X)
    new = [x.detach() - g for x, g in zip(leaves, torch.autograd.grad(loss, leaves), strict=True)]
    want = {"blocks": [{"w": x} for x in new[:2]], "v": new[2]}
    assert_trees_close(run_ranks(rank_main, 1 if way in ("plain", "remat", "names") else 2)[0], want, rtol=1e-10)


@pytest.mark.parametrize("way", WAYS)
def test_a_units_output_is_written_to_under_jvp(way: str) -> None:
    def written(call: Callable[..., torch.Tensor], p: Any, x: torch.Tensor) -> torch.Tensor:
        y = call(p["blocks"][0], x)
        y[:, 1] = 0
        return y.mul_(2).square().sum()

    params = {"blocks": [{"w": W}]}
    want = torch.func.jvp(lambda x: written(block, params, x), (X,), (W,))

    def rank_main(rank: int) -> Any:
        step = WAYS[way](fz.train_step(lambda p, x: written(fz.unit(block), p, x), fz.sgd(1.0)))
        state = step.init(params)
        return [torch.func.jvp(lambda x: step.forward(state, x), (X,), (W,)) for _ in range(2)]

    for found in run_ranks(rank_main, 2 if "ZeRO" in way else 1)[0]:
        assert_trees_close(found, want, rtol=1e-10)


def test_a_recomputed_unit_that_writes_in_place_is_differentiated_twice_at_once() -> None:
    @fz.unit
    def unit(p: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * p["w"]
        y *= p["w"]
        return y.sin()

    step = fz.remat(fz.train_step(lambda p, x: unit(p["blocks"][0], x).sum(), fz.sgd(1.0)))
    x = X.clone().requires_grad_()
    out, pullback = step.vjp(step.init({"blocks": [{"w": W}]}), x)
    _, (found,) = pullback(torch.ones_like(out), create_graph=True)
    (want,) = torch.autograd.grad((x * W * W).sin().sum(), x, create_graph=True)
    for g in (found, want):
        assert g.requires_grad
    second = [torch.autograd.grad(g.square().sum(), x)[0] for g in (found, want)]
    assert_trees_close(second[0], second[1], rtol=1e-10)
