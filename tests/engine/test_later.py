"""What lives between the halves of a pullback, and after them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from halved import F64, SHARDS, Layers, normed, params_of
from torch import nn

import fzero as fz
from fzero.engine.run import Run
from fzero.testing import LiveBytes, run_ranks


def test_between_the_halves_only_what_the_second_needs_is_kept() -> None:
    """Of a layer's graph its inputs and cotangents; nothing of what lies between."""

    fn, params = fz.functional(Layers(act=nn.Mish))

    step = fz.train_step(fn, fz.sgd(0.1))
    state, x = step.init(params), torch.ones(64, 16)
    size = sum(buffer.nbytes for buffer in state.params.locals().values())
    with LiveBytes() as live:
        out, pullback = step.vjp(state, x)
        cotangent = torch.ones_like(out)
        del out
        gc.collect()
        found = pullback.inputs(cotangent)
        gc.collect()
        between = live.now()
        grads = pullback.params()
        gc.collect()
        after = live.now()
    rows = 64 * 4
    kept = rows * 2 * (16 + 32 + 32 + 16) + rows * (16 + 8)  # inputs and cotangents of all layers
    norms = 2 * 2 * 16 * 4
    ends = rows * (8 + 16)  # the cotangent, and the input's
    assert between <= kept + norms + ends + rows * 8 + 512, (between, kept)
    assert after <= ends + size + 512, (after, size)
    del found, grads


def test_between_the_halves_no_graph_is_kept() -> None:
    seen: list[Any] = []

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        h = x @ p["w"]
        seen.append(weakref.ref(h))
        return torch.sin(h) @ p["a"]

    step = fz.train_step(fn, fz.sgd(0.1))
    out, pullback = step.vjp(step.init(params_of()), torch.ones(4, 5, dtype=F64))
    assert seen[-1]() is not None
    pullback.inputs(torch.ones_like(out))
    gc.collect()
    assert seen[-1]() is None


@pytest.mark.parametrize("shard", SHARDS)
def test_nothing_is_left_after_both_halves(shard: str) -> None:
    def rank_main(rank: int) -> None:
        step = SHARDS[shard](fz.train_step(normed, fz.sgd(0.1)))
        state = step.init(params_of())
        x = torch.randn(4, 5, dtype=F64)
        for ends in ("params", "inputs", "nothing"):
            seen: list[Any] = []
            traced = fz.with_fn(step, lambda p, x, seen=seen: seen.append(weakref.ref(h := x * 2)) or normed(p, h))
            out, pullback = traced.vjp(state, x)
            held = [[run.traversal] if isinstance(run, Run) else run._params for run in pullback._runs]
            own = [weakref.ref(x) for each in held for x in each]
            del held
            if ends != "nothing":
                pullback.inputs(torch.ones_like(out))
            if ends == "params":
                pullback.params()
                gc.collect()
                assert not any(ref() for ref in (*own, *seen))
            del pullback, out
            gc.collect()
            assert not any(ref() for ref in (*own, *seen)), ends

    run_ranks(rank_main, 1)
