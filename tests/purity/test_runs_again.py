"""What surrounds a second run of a unit is what surrounded its first, and what is pure by itself is the same again."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from units import F64, SHARDS, X, block_of, params_of

import fzero as fz
from fzero.base import random as streams
from fzero.testing import assert_trees_close, run_ranks

ONE = torch.ones((), dtype=F64)


@pytest.mark.parametrize("shard", SHARDS)
def test_what_backward_hooks_note_stays(shard: str) -> None:
    """Numbers, once for each pullback: a trial has none."""

    def rank_main(rank: int) -> None:
        norms: list[float] = []

        def body(q: Any, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(x @ q["w"])
            if h.requires_grad:
                h.register_hook(lambda g: norms.append(float(g.detach().norm())))
            return h

        step = SHARDS[shard](fz.train_step(block_of(body), fz.sgd(0.1)))
        state = step.init(params_of())
        for _ in range(3):
            state, _ = step(state, X)
        assert len(norms) == 6

    run_ranks(rank_main, 1)


def test_a_rank_that_keeps_what_others_let_go() -> None:
    """What is gathered ahead must not depend on what still exists: nobody knows when a rank collects its garbage."""

    def rank_main(rank: int) -> None:
        unit = fz.unit(lambda q, x: torch.tanh(x @ q["w"]))
        kept = []

        def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
            h = unit(p["blocks"][0], x)
            with torch.enable_grad():
                z = h.detach().requires_grad_() if not torch._C._functorch.maybe_current_level() else h  # type: ignore[attr-defined]
                energy = unit(p["blocks"][1], z)
                (slope,) = torch.autograd.grad(energy.sum(), z, retain_graph=True)
            kept.append(energy if rank == 0 else None)
            return unit(p["blocks"][0], unit(p["blocks"][1], h + slope.detach())).square().mean()

        step = fz.shard_zero3(fz.train_step(fn, fz.sgd(0.1)))
        state = step.init(params_of())
        for _ in range(3):
            out, pullback = step.vjp(state, X)
            pullback(torch.ones_like(out))

    run_ranks(rank_main, 2)


def test_an_operator_that_reads_memory() -> None:
    """torch.func's tensors have none. In a unit it runs on plain ones."""

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        targets = (x[:1, :1] * 0 + 1).long()
        scores = (x[:, None] * p["s"]).log_softmax(-1)
        return nn.functional.ctc_loss(scores, targets, targets[0] * 3, targets[0])

    params = params_of()
    params["s"].requires_grad_()
    loss(params, X).backward()
    step = fz.train_step(fz.unit(loss), fz.sgd(0.1))
    out, pullback = step.vjp(step.init(params_of()), X)
    assert_trees_close(fz.gather(pullback(torch.ones_like(out))[0])["s"], params["s"].grad)


def test_a_second_run_is_compared_where_a_mode_looked_at_the_first() -> None:
    """As FlopCounterMode does, around the forward only."""
    unit = fz.unit(lambda p, x: torch.sin(x @ p["w"]) * (2.0 if os.environ.get("FZERO_TEST_LATER") else 1.0))
    step = fz.remat(fz.train_step(lambda p, x: unit(p["blocks"][0], x).sum(), fz.sgd(0.1)))
    state = step.init({"blocks": [{"w": torch.eye(3)}]})
    with FlopCounterMode(display=False):
        loss, pullback = step.vjp(state, torch.ones(2, 3))
    os.environ["FZERO_TEST_LATER"] = "1"
    try:
        with pytest.raises(ValueError, match=r"calls mul\(1.0\) in one run and mul\(2.0\) in the next"):
            pullback(torch.ones_like(loss))
    finally:
        del os.environ["FZERO_TEST_LATER"]


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


@pytest.mark.parametrize("verb", ["step", "vjp", "vjp, not pulled", "tape"])
@pytest.mark.parametrize("shard", SHARDS)
def test_calls_end_with_their_pullback(shard: str, verb: str) -> None:
    """Nothing that a unit has computed is in a cycle, which nobody collects."""
    alive: list[weakref.ref[Any]] = []

    def body(q: Any, x: torch.Tensor) -> Any:
        h = torch.tanh(x @ q["w"])
        alive.append(weakref.ref(h.untyped_storage()))
        return h

    def rank_main(rank: int) -> None:
        step = SHARDS[shard](fz.train_step(block_of(body), fz.sgd(0.1)))
        state = step.init(params_of())
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

    run_ranks(rank_main, 1)
    gc.collect()
    assert len(alive) >= 6 and not any(reference() is not None for reference in alive)


def test_a_unit_keeps_no_module_alive_that_it_refers_to_weakly() -> None:
    module = nn.Linear(3, 3).double()
    refer = weakref.ref(module)
    alive = []

    @fz.unit
    def double(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        alive.append(refer() is not None)
        return x * p["w"]

    step = fz.remat(fz.train_step(lambda p, x: double(p, x).sum(), fz.sgd(0.1)))
    state = step.init({"w": torch.ones(3, dtype=F64)})
    step(state, X[:, :3])
    assert all(alive)
    del module
    gc.collect()
    alive.clear()
    step(state, X[:, :3])
    assert alive and not any(alive)


def test_a_thread_that_has_ended_has_ended() -> None:
    """Or what it leaves behind is destroyed while the interpreter ends, which aborts the process."""
    step = fz.train_step(lambda p, x: (x @ p["blocks"][0]["w"]).sum(), fz.sgd(0.1))
    run_ranks(lambda rank: step.forward(step.init(params_of()), X), 2)
    assert streams._stashed
    streams._wait_for_threads()
    assert not any(os.path.exists(f"/proc/self/task/{number}") for number in streams._stashed)
