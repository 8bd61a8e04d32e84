"""Users' Functions and hooks in pullbacks by halves under torch.func: those as a whole, or a refusal."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from drawn_pipelines import Copied
from halved import SHARDS
from torch import Tensor

import fzero as fz
from fzero.testing import assert_trees_equal, run_ranks

F64 = torch.float64
WORK: dict[torch.Size, Tensor] = {}


def double(cotangent: Tensor) -> Tensor:
    return torch.mul(cotangent, 2, out=WORK.setdefault(cotangent.shape, torch.empty_like(cotangent)))


class Doubled(Copied):
    """Its backward returns memory that the next one writes to."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:  # type: ignore[override]
        return double(cotangent)


class Reversed(Copied):
    """Its backward writes to what it is given."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:  # type: ignore[override]
        return cotangent.neg_()


@fz.unit
def product(p: Any, h: Tensor) -> Tensor:
    return torch.tanh(h @ p["w"])


@fz.unit
def linear(p: Any, h: Tensor) -> Tensor:
    return h @ p["w"]


def of(function: Any) -> dict[str, Any]:
    apply = function.apply

    @fz.unit
    def within(p: Any, h: Tensor) -> Tensor:
        return apply(h @ p["w"]) @ p["v"]

    @fz.unit
    def first(p: Any, h: Tensor) -> Tensor:
        return apply(h) @ p["w"]

    @fz.unit
    def last(p: Any, h: Tensor) -> Tensor:
        return apply(h @ p["w"])

    @fz.unit
    def beside(p: Any, h: Tensor) -> Tensor:
        return apply(h) + h @ p["w"]

    return {
        "the input": lambda p, x: apply(x) @ p["w"],
        "outside": lambda p, x: apply(x @ p["w"]) @ p["v"],
        "beside": lambda p, x: apply(x @ p["w"]) + x @ p["v"],
        "behind a unit": lambda p, x: apply(product(p["units"][0], x)) @ p["w"],
        "before a unit": lambda p, x: product(p["units"][0], apply(x @ p["w"])),
        "within a unit": lambda p, x: product(p["units"][1], within(p["units"][0], x @ p["w"])),
        "before a unit that has one": lambda p, x: within(p["units"][0], product(p["units"][1], x @ p["w"])),
        "beside a product of a unit": lambda p, x: product(p["units"][1], x) + beside(p["units"][0], x @ p["w"]),
        "first in a unit behind another": lambda p, x: first(p["units"][0], linear(p["units"][1], x @ p["w"])),
        "first in a unit behind a product": lambda p, x: first(p["units"][0], x @ p["w"]),
        "last in a unit beside another": lambda p, x: (
            last(p["units"][0], x @ p["v"]) + linear(p["units"][1], x @ p["w"])
        ),
        "in a unit twice": lambda p, x: within(p["units"][0], within(p["units"][0], x)) @ p["w"],
    }


def hooked(h: Tensor) -> Tensor:
    h.register_hook(double)
    return h


@fz.unit
def hooked_product(p: Any, h: Tensor) -> Tensor:
    return hooked(h @ p["w"]) @ p["v"]


FUNCTIONS = {
    **{f"doubles {name}": fn for name, fn in of(Doubled).items()},
    **{f"reverses {name}": fn for name, fn in of(Reversed).items()},
    "a hook": lambda p, x: hooked(x @ p["w"]) @ p["v"],
    "a hook in a unit": lambda p, x: hooked_product(p["units"][0], x) @ p["w"],
}


def params() -> Any:
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(4, 4, generator=generator, dtype=F64) / 2
    return {"units": [{"w": draw(), "v": draw()} for _ in range(2)], "w": draw(), "v": draw()}


def two(rank: int, name: str, shard: str) -> None:
    """First halves of two pullbacks before second halves, as in a zero bubble schedule."""
    fn = FUNCTIONS[name]
    step = SHARDS[shard](fz.train_step(fn, fz.sgd(0.1)))
    state, x = step.init(params()), torch.linspace(-1, 1, 32, dtype=F64).view(8, 4)
    cts, wanted = torch.linspace(1, 2, 32, dtype=F64).view(2, 4, 4), []
    for part, ct in zip(x.chunk(2), cts, strict=True):
        _, pullback = step.vjp(state, part)
        grads, (own,) = pullback(ct.clone())
        wanted.append((fz.gather(grads), own.clone()))
    pullbacks = [step.vjp(state, part)[1] for part in x.chunk(2)]
    try:
        cotangents = [pullback.inputs(ct.clone())[0] for pullback, ct in zip(pullbacks, cts, strict=True)]
        found = [fz.gather(pullback.params()) for pullback in pullbacks]
    except ValueError as error:
        assert name.startswith("a hook") and "writes to a cotangent" in str(error)
        return
    assert_trees_equal(list(zip(found, cotangents, strict=True)), wanted)


# a unit that is recomputed may close over no memory that is written to
CASES = [(name, shard) for name in FUNCTIONS for shard in ("unsharded", "ZeRO-3")]
CASES += [(name, shard) for name in FUNCTIONS if name.startswith("reverses") for shard in ("remat", "ZeRO-3, remat")]


@pytest.mark.parametrize(("name", "shard"), CASES)
def test_two_pullbacks_whose_halves_take_turns(name: str, shard: str) -> None:
    run_ranks(functools.partial(two, name=name, shard=shard), 1)
