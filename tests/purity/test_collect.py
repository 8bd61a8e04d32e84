"""fz.collect: values that leave a step's function or its units by a name, under every transform."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nightly import in_turns
from units import forms

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks

F64 = torch.float64
X = torch.linspace(-1.0, 1.0, 24, dtype=F64).view(6, 4)
STEPS = forms("plain", "ZeRO-1", "ZeRO-3", "ZeRO-3, remat", "remat") | {
    "names": lambda step: fz.remat(fz.shard_zero3(step), save=("h",)),
    "offload": lambda step: fz.offload(fz.remat(fz.shard_zero3(step)), params="host"),
    "microbatches": lambda step: fz.accumulate(fz.shard_zero3(step), 2),
    "fused": lambda step: fz.fuse_update(fz.shard_zero3(step)),
}
pytestmark = pytest.mark.filterwarnings("ignore:fz.offload to 'host'")


def params() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    return {"blocks": [{"w": torch.randn(4, 4, generator=draw, dtype=F64)} for _ in range(3)]}


def layer(p: Any, x: torch.Tensor, note: Callable[[torch.Tensor], object]) -> torch.Tensor:
    h = fz.name(torch.tanh(x @ p["w"]), "h")
    note(h.square().mean())
    return h


def plain_loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    own: list[torch.Tensor] = []
    for each in p["blocks"]:
        x = layer(each, x, own.append)
    return x.square().mean() + 0.5 * sum(own[1:], own[0])


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    block = fz.unit(lambda p, x: layer(p, x, lambda value: fz.collect(value, "aux")))
    for each in p["blocks"]:
        x = block(each, x)
    own = fz.collected("aux")
    fz.collect(x.mean(), "mean")
    return x.square().mean() + 0.5 * sum(own[1:], own[0])


@in_turns(2)
@pytest.mark.parametrize("how", STEPS)
def test_as_plain_torch(how: str) -> None:
    def rank_main(rank: int) -> tuple[Any, list[dict[str, list[torch.Tensor]]]]:
        step = STEPS[how](fz.train_step(loss, fz.sgd(0.1)))
        state, found = step.init(params()), []
        for _ in range(3):
            state, metrics = step(state, X)
            found.append(metrics["collected"])
        return fz.gather(state.params), found

    want, parts = params(), X.tensor_split(2) if how == "microbatches" else (X,)
    noted = []
    for _ in range(3):
        noted.append([])
        for part in parts:
            x = part
            for each in want["blocks"]:
                x = layer(each, x, noted[-1].append)
        grads = [torch.func.grad(plain_loss)(want, part) for part in parts]
        for i, each in enumerate(want["blocks"]):
            each["w"] = each["w"] - 0.1 * sum(g["blocks"][i]["w"] for g in grads) / len(grads)
    for got, collected in run_ranks(rank_main, 2 if how != "plain" else 1):
        assert_trees_close(got, want, rtol=1e-10)
        for own, values in zip(collected, noted, strict=True):
            assert len(own["mean"]) == len(parts) and not any(x.requires_grad for x in own["aux"])
            torch.testing.assert_close(torch.stack(own["aux"]), torch.stack(values), rtol=1e-10, atol=0)


@pytest.mark.parametrize("how", ["plain", "ZeRO-3", "ZeRO-3, remat"])
def test_under_a_derivative_of_a_derivative(how: str) -> None:
    def rank_main(rank: int) -> Any:
        step = STEPS[how](fz.train_step(loss, fz.sgd(0.1)))
        state = step.init(params())
        along, _ = step.vjp(state, X)[1](torch.ones((), dtype=F64))
        return fz.gather(along), fz.gather(fz.hvp(step, state, along, X))

    (along, got), *_ = run_ranks(rank_main, 1)
    want = torch.func.jvp(torch.func.grad(functools.partial(plain_loss, x=X)), (params(),), (along,))[1]
    assert_trees_close(got, want, rtol=1e-9)


def test_mistakes() -> None:
    assert fz.collect(X, "aux") is X
    with pytest.raises(RuntimeError, match="no step's function is running"):
        fz.collected("aux")
    reads = fz.unit(lambda p, x: x @ p["w"] * len(fz.collected("aux")))
    step = fz.remat(fz.train_step(lambda p, x: reads(p["blocks"][0], x).sum(), fz.sgd(0.1)))
    with pytest.raises(RuntimeError, match="Call it outside of units"):
        step(step.init(params()), X)


def test_what_begins_to_be_collected_later_is_refused() -> None:
    switch = {"on": False}

    def body(p: Any, x: torch.Tensor) -> torch.Tensor:
        return fz.collect(x @ p["w"], "h") if switch["on"] else x @ p["w"]

    unit = fz.unit(body)
    step = fz.remat(fz.train_step(lambda p, x: unit(p["blocks"][0], x).sum(), fz.sgd(0.1)))
    state, _ = step(step.init(params()), X)
    switch["on"] = True
    with pytest.raises(ValueError, match=r"'blocks.0' collects 'h', which it did not do in its first run"):
        step(state, X)


def test_what_is_collected_of_a_param_is_a_copy() -> None:
    unit = fz.unit(lambda p, x: fz.collect(x @ p["w"], "h") + fz.collect(p["w"], "w").sum())
    step = fz.train_step(lambda p, x: unit(p["blocks"][0], x).sum(), fz.sgd(0.1))
    state = step.init(params())
    before = fz.gather(state.params)
    _, metrics = step(state, X)
    for x in metrics["collected"]["w"]:
        x.zero_()
    assert_trees_equal(fz.gather(state.params), before)
