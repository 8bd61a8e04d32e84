"""fz.check_pure: functions that are pure pass, and each kind of effect is refused by name, with the line."""

from __future__ import annotations

import collections
import random
import re
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import fzero as fz
from fzero.testing import run_ranks

F64 = torch.float64
X = torch.linspace(-1.0, 1.0, 12, dtype=F64).view(3, 4)
STEPS: dict[str, Callable[[fz.Step], fz.Step]] = {
    "plain": lambda step: step,
    "ZeRO-3": fz.shard_zero3,
    "remat": lambda step: fz.remat(fz.shard_zero3(step)),
}
CONSTANT = torch.full((4,), 1.5, dtype=F64)
TABLE = {"scale": 2.0, "shift": CONSTANT}


def params() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    blocks = [{"w": torch.randn(4, 4, generator=generator, dtype=F64), "b": torch.ones(4, dtype=F64)} for _ in range(2)]
    return {"blocks": blocks, "g": torch.ones(4, dtype=F64)}


def checked(body: Any, how: str, ranks: int = 1) -> list[Any]:
    """What `check_pure` says of a step whose units run this."""
    block = fz.unit(body)

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            x = block(q, x)
        return (x * p["g"]).square().mean()

    def rank_main(rank: int) -> Any:
        step = STEPS[how](fz.train_step(fn, fz.sgd(0.1)))
        state = step.init(params())
        before = fz.gather(state.params)
        try:
            return fz.check_pure(step, state, X.clone())
        except (ValueError, TypeError) as error:
            return error
        finally:
            for own, was in zip(fz.gather(state.params)["blocks"], before["blocks"], strict=True):
                assert torch.equal(own["w"], was["w"])

    return run_ranks(rank_main, ranks)


PURE: dict[str, Any] = {
    "a layer": lambda q, x: torch.tanh(x @ q["w"] + q["b"]),
    "a constant": lambda q, x: torch.tanh(x @ q["w"]) * CONSTANT,
    "a table": lambda q, x: torch.tanh(x @ q["w"]) * TABLE["scale"] + TABLE["shift"],
    "dropout": lambda q, x: F.dropout(torch.tanh(x @ q["w"]), 0.3),
    "its own in place": lambda q, x: (x @ q["w"]).add_(q["b"]).tanh_(),
    "its own list": lambda q, x: sum([x @ q["w"], q["b"]], start=torch.zeros((), dtype=F64)),
    "a gradient inside": lambda q, x: x + torch.func.grad(lambda y: torch.tanh(y @ q["w"]).sum())(x),
    "a map inside": lambda q, x: torch.func.vmap(lambda row: torch.tanh(row @ q["w"]))(x),
    "a view of an input": lambda q, x: x.view(4, 3).t().reshape(3, 4) @ q["w"],
    "an input itself": lambda q, x: x,
    "what numbers make": lambda q, x: torch.tanh(x @ q["w"]) * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64),
    "a branch on a value": lambda q, x: torch.tanh(x @ q["w"]) if x.shape[0] == 3 else x,
}


@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("body", PURE.values(), ids=PURE.keys())
def test_what_is_pure_passes(body: Any, how: str) -> None:
    for report in checked(body, how, ranks=2 if how != "plain" else 1):
        assert [own.unit for own in report.units] == ["blocks.0", "blocks.1"]
        assert "pure" in repr(report)


def test_a_checkpoint_inside() -> None:
    body = lambda q, x: torch.utils.checkpoint.checkpoint(lambda y: torch.tanh(y @ q["w"]), x, use_reentrant=False)
    (report,) = checked(body, "ZeRO-3")
    assert len(report.units) == 2


def test_a_table_that_is_made_once() -> None:
    """Of no argument: a constant, whoever asks for it first."""
    made: dict[int, torch.Tensor] = {}

    def body(q: Any, x: torch.Tensor) -> torch.Tensor:
        if 4 not in made:
            made[4] = torch.arange(4, dtype=F64)
        return torch.tanh(x @ q["w"]) * made[4]

    (report,) = checked(body, "ZeRO-3")
    assert [own.captured for own in report.units] == [1, 1]


# ---- effects


def _store() -> Any:
    return types.SimpleNamespace(kept=[], table={}, order=collections.deque(), count=0, h=None)


def _memo(store: Any, q: Any, x: torch.Tensor) -> torch.Tensor:
    if "m" not in store.table:
        store.table["m"] = x.mean()
    return x @ q["w"] * store.table["m"]


def _counts(store: Any, q: Any, x: torch.Tensor) -> torch.Tensor:
    store.count += 1
    return x @ q["w"] * store.count


KEEPS = r"keeps a tensor .*outlives it.*Return it"
OTHER = r"calls .* in one run and .* in the next, with the same arguments|returns other values in a second run"
EFFECTS: dict[str, tuple[Any, str]] = {
    "a list": (lambda s, q, x: (s.kept.append(x @ q["w"]), torch.tanh(x))[1], KEEPS),
    "a dict": (lambda s, q, x: (s.table.update(h=x * 2), torch.tanh(x))[1], KEEPS),
    "a deque": (lambda s, q, x: (s.order.append(q["w"] * 2), torch.tanh(x))[1], KEEPS),
    "an attribute": (lambda s, q, x: (setattr(s, "h", x @ q["w"]), torch.tanh(x))[1], KEEPS),
    "an attribute of a function": (lambda s, q, x: (setattr(_store, "h", x @ q["w"]), torch.tanh(x))[1], KEEPS),
    "a closure that is kept": (lambda s, q, x: (s.kept.append(lambda y=x @ q["w"]: y), torch.tanh(x))[1], KEEPS),
    "a storage": (lambda s, q, x: (s.kept.append((x @ q["w"]).untyped_storage()), torch.tanh(x))[1], KEEPS),
    "a view": (lambda s, q, x: (s.kept.append((x @ q["w"])[0]), torch.tanh(x))[1], KEEPS),
    "a detached one": (lambda s, q, x: (s.kept.append((x @ q["w"]).detach()), torch.tanh(x))[1], KEEPS),
    "a leaf": (lambda s, q, x: (s.kept.append(q["w"]), torch.tanh(x))[1], KEEPS),
    "an output": (lambda s, q, x: s.kept.append(torch.tanh(x @ q["w"])) or s.kept[-1], KEEPS),
    "a cycle": (lambda s, q, x: (s.kept.append([s.kept, x * 2]), torch.tanh(x))[1], KEEPS),
    "a memo": (_memo, KEEPS),
    "an input in place": (lambda s, q, x: torch.tanh(x.mul_(2.0) @ q["w"]), r"writes to .*in place"),
    "an input as out": (lambda s, q, x: torch.mul(x, 2.0, out=x), r"writes to .*in place"),
    "a row of an input": (lambda s, q, x: (x.__setitem__(0, 1.0), torch.tanh(x))[1], r"writes to .*in place"),
    "a leaf by data": (lambda s, q, x: (q["w"].data.mul_(0.5), x @ q["w"])[1], r"in place"),
    "a leaf detached": (lambda s, q, x: (q["b"].detach().add_(1.0), x @ q["w"])[1], r"in place"),
    "a constant": (lambda s, q, x: torch.tanh(x) * s.own.mul_(2.0), r"writes to .*closes over"),
    "statistics": (
        lambda s, q, x: F.batch_norm(x @ q["w"], s.own[0], s.own[1], training=True),
        r"writes to .*closes over|in place",
    ),
    "a counter": (_counts, OTHER),
    "a clock": (lambda s, q, x: torch.tanh(x @ q["w"]) * (time.perf_counter_ns() % 1000003), OTHER),
    "Python's generator": (lambda s, q, x: torch.tanh(x @ q["w"]) * random.random(), OTHER),
    "numpy's generator": (lambda s, q, x: torch.tanh(x @ q["w"]) * float(np.random.rand()), OTHER),
    "a tensor of numpy's": (lambda s, q, x: torch.tanh(x) * torch.from_numpy(np.random.rand(4)), OTHER),
    "its own generator": (lambda s, q, x: x + torch.rand(4, dtype=F64, generator=s.generator), OTHER),
    "another number of operations": (
        lambda s, q, x: (setattr(s, "count", s.count + 1), x * 2 if s.count % 2 else torch.tanh(x) * 2)[1],
        r"calls .* in one",
    ),
    "numpy": (lambda s, q, x: (x.detach().numpy().fill(0.5), torch.tanh(x))[1], r"autograd does not see|returns other"),
}


@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize(("body", "match"), EFFECTS.values(), ids=EFFECTS.keys())
def test_an_effect_is_refused(body: Any, match: str, how: str) -> None:
    if (how, body) == ("plain", EFFECTS["a leaf"][0]):
        pytest.skip("full leaves are the caller's own: whoever keeps one keeps no value of this run")
    store = _store()
    store.own, store.generator = torch.ones(2, 4, dtype=F64), torch.Generator()
    if body is EFFECTS["a constant"][0]:
        store.own = torch.ones(4, dtype=F64)
    try:
        (error,) = checked(lambda q, x: body(store, q, x), how)
        assert isinstance(error, (ValueError, TypeError)), error
        assert re.search(match, str(error)) and "blocks.0" in str(error), error
    finally:
        vars(_store).clear()


def test_a_tensor_that_is_differentiated() -> None:
    """Closed over by a unit it would have no gradient; by the step's function it may have one."""

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        scale = p["g"] * 2
        return fz.unit(lambda q, x: torch.tanh(x @ q["w"]) * scale)(p["blocks"][0], x).sum()

    step = fz.shard_zero3(fz.train_step(fn, fz.sgd(0.1)))

    def rank_main(rank: int) -> None:
        with pytest.raises(ValueError, match=r"'blocks.0' closes over a tensor of shape \(4,\) .*test_check_pure.py"):
            fz.check_pure(step, step.init(params()), X)

    run_ranks(rank_main, 2)


def test_the_function_itself() -> None:
    kept: list[torch.Tensor] = []
    leaks = fz.train_step(lambda p, x: (kept.append(h := x @ p["w"]), h.sum())[1], fz.sgd(0.1))
    with pytest.raises(ValueError, match=r"step: the function keeps a tensor .*test_check_pure.py"):
        fz.check_pure(leaks, leaks.init({"w": torch.ones(4, 4, dtype=F64)}), X)
    ticks = fz.train_step(lambda p, x: (x @ p["w"]).sum() * random.random(), fz.sgd(0.1))
    with pytest.raises(ValueError, match=r"step: the function calls mul.*test_check_pure.py"):
        fz.check_pure(ticks, ticks.init({"w": torch.ones(4, 4, dtype=F64)}), X)


def test_modules() -> None:
    class Block(nn.Module):
        def __init__(self, keeps: bool) -> None:
            super().__init__()
            self.lin, self.norm, self.keeps = nn.Linear(4, 4), nn.LayerNorm(4), keeps

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.lin(self.norm(x)))
            if self.keeps:
                self.last = h
            return x + h

    for keeps in (False, True):
        apply, own = fz.functional(nn.Sequential(Block(False), Block(keeps)).double())

        def rank_main(rank: int, apply: Any = apply, own: Any = own, keeps: bool = keeps) -> None:
            step = fz.shard_zero3(fz.train_step(lambda p, x: apply(p, x).square().mean(), fz.sgd(0.1)))
            state = step.init(own)
            if keeps:
                with pytest.raises(ValueError, match=r"Unit '1' keeps a tensor .*h = torch.tanh"):
                    fz.check_pure(step, state, X)
            else:
                assert len(fz.check_pure(step, state, X).units) == 2

        run_ranks(rank_main, 2)
