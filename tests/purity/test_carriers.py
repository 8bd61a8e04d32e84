"""Objects that go in and out of units: registered carriers, caches of transformers, dataclasses."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nightly import in_turns
from units import forms

import fzero as fz
from fzero.base import carriers
from fzero.testing import assert_trees_close, run_ranks

F64 = torch.float64
X = torch.linspace(-1.0, 1.0, 24, dtype=F64).view(6, 4)
STEPS = forms("plain", "ZeRO-3", "ZeRO-3, remat", "microbatches") | {
    "names": lambda step: fz.remat(fz.shard_zero3(step), save=("h",)),
}


class Cache:
    """Keys of all layers so far."""

    def __init__(self, keys: Any = (), layers: int = 0) -> None:
        self.keys, self.layers = list(keys), layers

    def update(self, key: torch.Tensor) -> torch.Tensor:
        self.keys.append(key)
        self.layers += 1
        return torch.stack(self.keys).mean(0)


fz.register_carrier(Cache, lambda c: (c.keys, c.layers), lambda layers, keys: Cache(keys, layers))


@dataclasses.dataclass(slots=True)
class Slotted:
    x: torch.Tensor


@dataclasses.dataclass
class Hidden:
    x: torch.Tensor
    scale: float = 1.0


def params() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    return {"blocks": [{"w": torch.randn(4, 4, generator=draw, dtype=F64)} for _ in range(3)]}


def with_cache(p: Any, x: torch.Tensor, cache: Cache) -> torch.Tensor:
    return fz.name(torch.tanh(x @ p["w"] + cache.update(x @ p["w"].T)), "h")


def returns_it(p: Any, x: torch.Tensor, cache: Cache) -> Any:
    return with_cache(p, x, cache), cache


def with_data(p: Any, h: Hidden) -> Hidden:
    own = Slotted(fz.name(torch.tanh(h.x @ p["w"]), "h"))
    return Hidden(own.x * h.scale, h.scale)


def with_slots(p: Any, h: Slotted) -> Slotted:
    return Slotted(fz.name(torch.tanh(h.x @ p["w"]), "h"))


def of_cache(unit: Callable[[Any], Any], p: Any, x: torch.Tensor) -> torch.Tensor:
    block, cache = unit(with_cache), Cache()
    for each in p["blocks"]:
        x = block(each, x, cache)
    assert cache.layers == 3
    return x.square().mean() + sum(key.mean() for key in cache.keys)


def of_returned(unit: Callable[[Any], Any], p: Any, x: torch.Tensor) -> torch.Tensor:
    block, cache = unit(returns_it), Cache()
    for each in p["blocks"]:
        x, own = block(each, x, cache)
        assert own is cache
    return x.square().mean() + sum(key.mean() for key in cache.keys)


def of_data(unit: Callable[[Any], Any], p: Any, x: torch.Tensor) -> torch.Tensor:
    block, h = unit(with_data), Hidden(x, 1.5)
    for each in p["blocks"]:
        h = block(each, h)
    return h.x.square().mean()


def of_slots(unit: Callable[[Any], Any], p: Any, x: torch.Tensor) -> torch.Tensor:
    block, h = unit(with_slots), Slotted(x)
    for each in p["blocks"]:
        h = block(each, h)
    return h.x.square().mean()


@in_turns(3)
@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("fn", [of_cache, of_returned, of_data, of_slots])
def test_as_plain_torch(fn: Any, how: str) -> None:
    plain = functools.partial(fn, lambda body: body)

    def rank_main(rank: int) -> Any:
        step = STEPS[how](fz.train_step(functools.partial(fn, fz.unit), fz.sgd(0.1)))
        state = step.init(params())
        for _ in range(3):
            state, _ = step(state, X)
        return fz.gather(state.params)

    want, parts = params(), X.tensor_split(2) if how == "microbatches" else (X,)
    for _ in range(3):
        grads = [torch.func.grad(plain)(want, part) for part in parts]
        for i, each in enumerate(want["blocks"]):
            each["w"] = each["w"] - 0.1 * sum(g["blocks"][i]["w"] for g in grads) / len(grads)
    for got in run_ranks(rank_main, 1 if how in ("plain", "microbatches") else 2):
        assert_trees_close(got, want, rtol=1e-10)


def test_what_is_no_carrier() -> None:
    class Box:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    def refused(body: Any, given: Any, match: str) -> None:
        first, unit = fz.unit(lambda p, x: x @ p["w"]), fz.unit(body)
        fn = lambda p, x: unit(p["blocks"][1], given(first(p["blocks"][0], x))).x.sum()
        step = fz.remat(fz.train_step(fn, fz.sgd(0.1)))
        with pytest.raises(ValueError, match=match):
            step(step.init(params()), X)

    refused(lambda p, x: Box(x @ p["w"]), lambda x: x, r"'blocks.1' returns an object of type Box that holds tensors")
    reads = r"'blocks.1' closes over a tensor of shape \(6, 4\) that is differentiated .*test_carriers.py"
    refused(lambda p, box: Box(box.x @ p["w"]), Box, reads)
    fills = lambda p, h: (setattr(h, "scale", 2.0), Hidden(h.x @ p["w"]))[1]
    refused(fills, Hidden, r"'blocks.1' changes a list, a dict or another object among its arguments")


def test_a_type_is_registered_once() -> None:
    with pytest.raises(ValueError, match="already registered"):
        fz.register_carrier(Cache, lambda c: (c.keys, None), lambda _, keys: Cache(keys))


class Configured:
    def __init__(self, total: torch.Tensor, config: dict[str, float]) -> None:
        self.total, self.config = total, config


fz.register_carrier(Configured, lambda c: ([c.total], c.config), lambda config, kept: Configured(kept[0], config))


@pytest.mark.parametrize("how", ["plain", "ZeRO-3", "ZeRO-3, remat"])
def test_what_no_tensor_holds_is_that_of_each_call(how: str) -> None:
    """Two dicts are equal whose entries have another order."""

    def body(p: Any, x: torch.Tensor, c: Configured) -> torch.Tensor:
        h = torch.tanh(x @ p["w"])
        for key, value in c.config.items():
            h = torch.tanh(h * value + len(key))
        c.total = c.total + h.mean()
        return h

    def loss(unit: Any, p: Any, turned: bool) -> torch.Tensor:
        own = Configured(torch.zeros((), dtype=F64), {"bb": 0.5, "a": 2.0} if turned else {"a": 2.0, "bb": 0.5})
        x = X
        for block in p["blocks"]:
            x = unit(block, x, own)
        return x.square().mean() + own.total

    want = [loss(body, params(), turned) for turned in (False, True, False)]

    def rank_main(rank: int) -> list[torch.Tensor]:
        step = STEPS[how](fz.train_step(lambda p, turned: loss(fz.unit(body), p, turned), fz.sgd(0.0)))
        state = step.init(params())
        return [step(state, turned)[1]["loss"] for turned in (False, True, False)]

    for got in run_ranks(rank_main, 1 if how == "plain" else 2):
        assert_trees_close(got, want, rtol=1e-10)


def test_one_carrier_given_twice_is_refused() -> None:
    unit = fz.unit(lambda p, x, a, b: x @ p["w"] + a.update(x).mean() + b.update(x).mean())

    def loss(p: Any, x: torch.Tensor, one: bool) -> torch.Tensor:
        first, second = Cache(), Cache()
        return unit(p["blocks"][0], x, first, first if one else second).sum()

    step = fz.remat(fz.train_step(loss, fz.sgd(0.1)))
    state, _ = step(step.init(params()), X, False)
    with pytest.raises(TypeError, match=r"one object twice .* 'Cache'.* Give it once"):
        step(state, X, True)


def test_a_type_that_several_threads_come_to_at_once() -> None:
    for number in range(100):
        kind = dataclasses.make_dataclass(f"Kind{number}", ["x", "y"])
        ready, found = threading.Barrier(4), list[Any]()

        def come(kind: Any = kind, ready: threading.Barrier = ready, found: list[Any] = found) -> None:
            ready.wait()
            found.append(carriers.flatten_first(kind(X, 1.5))[1])

        threads = [threading.Thread(target=come) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [spec.num_leaves for spec in found] == [2] * 4, number
