"""What a unit reaches and passes on: nothing outlives its pullback, is gathered twice, or is lost unseen."""

from __future__ import annotations

import contextvars
import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from units import F64, SHARDS, X, params_of

import fzero as fz
from fzero.engine import op as unit
from fzero.testing import assert_trees_close, run_ranks

ONE = torch.ones((), dtype=F64)


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4, dtype=F64)
        self.aux: Any = None

    def forward(self, x: torch.Tensor, log: list[torch.Tensor], total: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.lin(x))
        self.aux = h.square().mean()
        log.append(h.mean())
        total.add_(h.sum())
        return h


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noting() for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        log: list[torch.Tensor] = []
        total: Any = torch.zeros((), dtype=F64) * x.sum()
        for block in self.blocks:
            x = block(x, log, total)
        blocks: Any = self.blocks
        return x.sum() + total + sum(log) + sum(b.aux for b in blocks)


@pytest.mark.parametrize("verb", ["step", "vjp", "vjp, not pulled", "tape"])
@pytest.mark.parametrize("shard", SHARDS)
def test_calls_end_with_their_pullback(shard: str, verb: str, monkeypatch: Any) -> None:
    """An output that lies in an object which the call knows leads back to the call: a cycle that nobody collects."""
    alive: list[weakref.ref[Any]] = []
    original = unit.Call.__init__

    def counted(self: Any, *args: Any) -> None:
        original(self, *args)
        alive.append(weakref.ref(self))

    def rank_main(rank: int) -> None:
        apply, params = fz.functional(Net())
        step = SHARDS[shard](fz.train_step(apply, fz.sgd(0.1)))
        state = step.init(params)
        for _ in range(3):
            if verb == "step":
                state, _ = step(state, X)
            elif verb == "tape":
                with fz.tape(step, state) as model:
                    model(X).backward()
            else:
                _, pullback = step.vjp(state, X)
                if verb == "vjp":
                    pullback(ONE)
                del pullback

    monkeypatch.setattr(unit.Call, "__init__", counted)
    run_ranks(rank_main, 1)
    gc.collect()
    assert len(alive) >= 6 and sum(reference() is not None for reference in alive) == 0


class Holder:
    h: Any = None
    reads = False


def test_ranks_that_learn_different_things_of_a_call() -> None:
    """A call that is begun anew, on one rank only, gathers nothing again."""

    @fz.unit
    def block(q: Any, x: torch.Tensor, held: Holder) -> torch.Tensor:
        h = torch.tanh(x @ q["w"])
        return h + held.h if held.reads else h

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        held, expert = Holder(), int(x[0, 0] < 0)
        held.h = p["s"] * x
        for i, q in enumerate(p["blocks"]):
            held.reads = i == expert
            x = block(q, x, held)
        return x.square().sum()

    batches = [X, -X]
    want = [torch.func.grad(loss)(params_of(), x) for x in batches]

    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(loss, fz.sgd(0.1)))
        out, pullback = step.vjp(step.init(params_of()), batches[rank])
        assert_trees_close(out, loss(params_of(), batches[rank]), rtol=1e-12)
        grads = fz.gather(pullback(ONE)[0])
        assert_trees_close(grads["s"], (want[0]["s"] + want[1]["s"]) / 2, rtol=1e-12)

    run_ranks(rank_main, 2, checked=False)


def refused(fn: Any, *inputs: Any, runs: int = 3, match: str) -> None:
    """In all runs but the first the function is told to do it."""

    def rank_main(rank: int) -> None:
        for shard in SHARDS.values():
            step = shard(fz.train_step(fn, fz.sgd(0.1)))
            state = step.init(params_of())
            for run in range(runs - 1):
                step.vjp(state, *inputs, False)[1](ONE)
                if run:
                    step.forward(state, *inputs, False)
            with pytest.raises((ValueError, TypeError), match=match):
                step.vjp(state, *inputs, True)[1](ONE)

    run_ranks(rank_main, 1)


def test_inputs_that_share_memory() -> None:
    def body(q: Any, x: torch.Tensor, row: torch.Tensor, changes: bool) -> torch.Tensor:
        x = x.mul_(2.0) if changes else x * 2
        return torch.tanh((x + row) @ q["w"])

    def fn(p: Any, x: torch.Tensor, changes: bool) -> torch.Tensor:
        x = x * 1.5
        return fz.unit(body)(p["blocks"][0], x, x[:1], changes).sum()

    refused(fn, X, match=r"in place, of shape \(3, 4\), which shares its memory with another one, of shape \(1, 4\)")


def test_an_iterator_as_an_argument() -> None:
    def fn(p: Any, x: torch.Tensor, iterates: bool) -> torch.Tensor:
        rows: Any = iter([x, x]) if iterates else [x, x]
        return fz.unit(lambda q, rows: torch.stack([row @ q["w"] for row in rows]).sum(0))(p["blocks"][0], rows).sum()

    refused(fn, X, match="A unit got a list_iterator as an argument, expected what can be read more than once")


def test_what_is_caught_keeps_what_was_done() -> None:
    """A unit that raises halfway, and is tried again by its caller."""

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        trace: list[int] = []

        @fz.unit
        def block(q: Any, x: torch.Tensor) -> torch.Tensor:
            trace.append(1)
            if len(trace) % 2:
                raise ArithmeticError("once more")
            return torch.tanh(x @ q["w"]) * len(trace)

        for q in p["blocks"]:
            for _ in range(3):
                try:
                    x = block(q, x)
                    break
                except ArithmeticError:
                    continue
        return x.square().sum()

    want = torch.func.grad(fn)(params_of(), X)

    def rank_main(rank: int) -> None:
        for shard in SHARDS.values():
            step = shard(fz.train_step(fn, fz.sgd(0.1)))
            assert_trees_close(fz.gather(step.vjp(step.init(params_of()), X)[1](ONE)[0]), want, rtol=1e-12)

    run_ranks(rank_main, 1)


def test_the_default_dtype_around_a_unit() -> None:
    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(F64)
        try:
            return fz.unit(lambda q, x: x @ q["w"] * torch.tensor(1 / 3))(p["blocks"][0], x).square().sum()
        finally:
            torch.set_default_dtype(before)

    want = torch.func.grad(fn)(params_of(), X)
    step = fz.remat(fz.train_step(fn, fz.sgd(0.1)))
    assert_trees_close(fz.gather(step.vjp(step.init(params_of()), X)[1](ONE)[0]), want, rtol=1e-12)


_collected: contextvars.ContextVar[dict[str, list[torch.Tensor]] | None] = contextvars.ContextVar("x", default=None)


def _collect(x: torch.Tensor) -> torch.Tensor:
    held = _collected.get()
    if held is not None:
        held["seen"].append(x)
    return x


@pytest.mark.parametrize("remat", [False, True])
def test_what_a_unit_puts_into_a_context_variables_list_leaves_it_with_its_gradient(remat: bool) -> None:
    """As transformers collects attentions and what routers say, for a loss of them all."""

    def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x + _collect(torch.tanh(x * p["w"]))

    def loss(params: Any, x: torch.Tensor, layer: Any) -> torch.Tensor:
        token = _collected.set({"seen": []})
        try:
            for p in params["layers"]:
                x = layer(p, x)
            held = _collected.get()
        finally:
            _collected.reset(token)
        assert held is not None and len(held["seen"]) == 3
        return x.sum() + sum(own.square().sum() for own in held["seen"])

    params = {"layers": [{"w": torch.tensor(own, dtype=torch.float64)} for own in (0.5, -0.3, 0.8)]}
    x = torch.linspace(-1.0, 1.0, 4, dtype=torch.float64)
    want = torch.func.grad(lambda params: loss(params, x, layer))(params)
    step = fz.shard_zero3(fz.train_step(functools.partial(loss, layer=fz.unit(layer)), fz.sgd(0.1)))
    step = fz.remat(step) if remat else step

    def rank_main(rank: int) -> Any:
        state = step.init(params)
        for _ in range(2):  # the second run gathers in the order of the first
            out, pullback = step.vjp(state, x)
            grads = fz.gather(pullback(torch.ones_like(out))[0])
        return grads

    for found in run_ranks(rank_main, 2):
        assert_trees_close(found, want, rtol=1e-12)
    assert _collected.get() is None
