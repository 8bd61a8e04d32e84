"""A later call of a unit is right where it is not as the first one was: the proof of that one says nothing of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import in_turns
from torch.overrides import TorchFunctionMode
from units import F64, X, forms, params_of

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

FORMS = forms("plain", "ZeRO-3", "remat", "ZeRO-3, remat") | {
    "offload": lambda step: fz.offload(fz.shard_zero3(step), activations="host"),
}


@dataclasses.dataclass
class One:
    h: torch.Tensor


@dataclasses.dataclass
class Other:
    h: torch.Tensor


class Halves(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is torch.tanh else out


@fz.unit
def of_dict(p: Any, x: torch.Tensor, d: Any) -> torch.Tensor:
    return torch.cat(list(d.values()), -1)[:, :4] * torch.tanh(x @ p["w"])


@fz.unit
def of_keywords(p: Any, x: torch.Tensor, **own: float) -> torch.Tensor:
    for value in own.values():
        x = torch.tanh(x) * value + value
    return x @ p["w"]


@fz.unit
def of_types(p: Any, x: torch.Tensor, other: torch.Tensor) -> Any:
    h = torch.tanh(x @ p["w"])
    return Other(h * 2) if len(other) > 1 else One(h)


@fz.unit
def of_attribute(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"]) * getattr(x, "scale", 1.0)


@fz.unit
def bare(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"])


def of_closure(p: Any, x: torch.Tensor, by: Any) -> torch.Tensor:
    for own, s in zip([p] * 3, by, strict=True):
        x = fz.unit(lambda q, x: torch.tanh(x @ q["w"]) * s)(own, x)
    return x


def dressed(p: Any, x: torch.Tensor, other: bool) -> torch.Tensor:
    x = x * 1
    if other:
        x.scale = 2.0  # type: ignore[attr-defined]
    return of_attribute(p, x)


def under(mode: Callable[[], Any]) -> Callable[..., torch.Tensor]:
    def called(p: Any, x: torch.Tensor, other: bool) -> torch.Tensor:
        with mode() if other else contextlib.nullcontext():
            return bare(p, x)

    return called


# what is called, told whether it is the other way
CALLS: dict[str, Callable[[Any, torch.Tensor, bool], Any]] = {
    "a dict": lambda p, x, other: of_dict(p, x, {"b": 2 * x, "a": x} if other else {"a": x, "b": 2 * x}),
    "keywords": lambda p, x, other: of_keywords(p, x, **({"b": 3.0, "a": 1.0} if other else {"a": 1.0, "b": 3.0})),
    "a type": lambda p, x, other: of_types(p, x, torch.ones(2 if other else 1)).h,
    "an attribute": dressed,
    "a mode": under(Halves),
    "autocast": under(lambda: torch.autocast("cpu", torch.bfloat16)),
    "numbers of a loop": lambda p, x, other: of_closure(p, x, (1.0, 0.5, 0.25) if other else (1.0, 1.0, 1.0)),
    "tensors of a loop": lambda p, x, other: of_closure(p, x, torch.eye(4, dtype=F64)[:3] + 2.0 * other),
}


def trained(call: Callable[..., Any], order: Sequence[bool], form: Callable[[fz.Step], fz.Step]) -> Any:
    def loss(p: Any, x: torch.Tensor, other: bool) -> torch.Tensor:
        for block in p["blocks"]:
            x = call(block, x, other).to(F64)
        return x.square().mean()

    step = form(fz.train_step(loss, fz.sgd(0.1)))
    state, losses = step.init(params_of()), []
    for other in order:
        state, metrics = step(state, X, other)
        losses.append(metrics["loss"])
    return losses, fz.gather(state.params)


def wanted(call: Callable[..., Any], order: Sequence[bool]) -> Any:
    p, losses = params_of(), []

    def loss(p: Any, other: bool) -> torch.Tensor:
        x = X
        for block in p["blocks"]:
            x = call(block, x, other).to(F64)
        return x.square().mean()

    for other in order:
        grads, value = torch.func.grad_and_value(loss)(p, other)
        losses.append(value)
        p = optree.tree_map(lambda x, g: x - 0.1 * g, p, grads)
    return losses, p


@in_turns(6)
@pytest.mark.parametrize("call", CALLS)
@given(order=st.lists(st.booleans(), min_size=2, max_size=4), form=st.sampled_from(sorted(FORMS)))
@settings(max_examples=6)
def test_calls_in_any_order(call: str, order: list[bool], form: str) -> None:
    want = wanted(CALLS[call], order)
    ranks = 2 if "ZeRO" in form or form == "offload" else 1
    for got in run_ranks(lambda rank: trained(CALLS[call], order, FORMS[form]), ranks):
        assert_trees_close(got, want, rtol=1e-2 if call == "autocast" else 1e-9)


def test_a_tensor_of_a_transform_that_has_ended() -> None:
    """A unit that runs again closes over it, and it is a constant."""

    def loss(p: Any, x: torch.Tensor, scale: torch.Tensor, unit: Any = fz.unit) -> torch.Tensor:
        def inside(x: torch.Tensor) -> torch.Tensor:
            s = scale * 2.0
            return unit(lambda q, x: torch.tanh(x @ q["w"]) * s)(p["blocks"][0], x).sum()

        return torch.func.grad(inside)(x).square().mean()

    step, scale, params = fz.remat(fz.train_step(loss, fz.sgd(1.0))), torch.tensor(0.5, dtype=F64), params_of()
    new = fz.gather(step(step.init(params), X, scale)[0].params)
    want = torch.func.grad(lambda p: loss(p, X, scale, lambda fn: fn))(params)
    w, g = (tree["blocks"][0]["w"] for tree in (params, want))
    torch.testing.assert_close(new["blocks"][0]["w"], w - g)
