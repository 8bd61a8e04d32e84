"""Optimizers of whole leaves in a function's graph: their gathers are messages of the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nightly import in_turns

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

GENERATOR = torch.Generator().manual_seed(0)
PARAMS = {
    "blocks": [{"w": torch.randn(4, 6, dtype=torch.float64, generator=GENERATOR)}],
    "o": torch.randn(6, 4, dtype=torch.float64, generator=GENERATOR),
    "b": torch.randn(4, dtype=torch.float64, generator=GENERATOR),
}
X = torch.randn(4, 4, dtype=torch.float64, generator=GENERATOR)
block = fz.unit(lambda p, x: torch.tanh(x @ p["w"]))


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (block(p["blocks"][0], x) @ p["o"] + p["b"] - x).square().mean()


def written_by_hand() -> fz.GradientTransformation:
    def update(grads: Any, state: Any, params: Any) -> Any:
        new = {path: 0.9 * state[path] + g / (1 + g.norm()) for path, g in grads.items()}
        return {path: -0.1 * x for path, x in new.items()}, new

    return fz.GradientTransformation(lambda params: {path: torch.zeros_like(x) for path, x in params.items()}, update)


def by_elements() -> fz.GradientTransformation:
    def update(grads: Any, state: Any, params: Any) -> Any:
        new = {path: 0.9 * state["m"][path] + g for path, g in grads.items()}
        return {path: -0.1 * x / (1 + state["n"]) for path, x in new.items()}, {"m": new, "n": state["n"] + 1}

    return fz.GradientTransformation(functools.partial(begun, torch.zeros(())), update, elementwise=True)


def begun(count: Any, params: Any) -> Any:
    return {"m": {path: torch.zeros_like(x) for path, x in params.items()}, "n": count}


OPTIMIZERS: dict[str, Callable[[], fz.GradientTransformation]] = {
    "whole": lambda: fz.whole(fz.adamw(1e-2)),
    "muon": lambda: fz.partition({"b": fz.adamw(1e-2), "*": fz.muon(1e-2)}),
    "clipped": lambda: fz.chain(fz.clip_by_global_norm(0.1), fz.whole(fz.adamw(1e-2))),
    "of one's own": written_by_hand,
    "declared elementwise": by_elements,
    "adafactor": lambda: fz.adafactor(0.1),
}


@in_turns(3)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numbers_of_the_step(name: str, ranks: int) -> None:
    def run(rank: int) -> int:
        step = fz.shard_zero3(fz.train_step(loss, OPTIMIZERS[name]()))
        fast = fz.jit(lambda state, x: step(*step(state, x)[:1], x), backend="graph")
        state = other = step.init(PARAMS)
        for factor in (1.0, 2.0, torch.nan, 3.0):
            x = factor * X.chunk(ranks)[rank]
            state, metrics = step(*step(state, x)[:1], x)
            other, found = fast(other, x)
            assert found["skipped"] == metrics["skipped"] and other.step == state.step
            assert_trees_close(fz.gather(other.params), fz.gather(state.params), rtol=1e-10)
            assert repr(other.moments) == repr(state.moments)
        return fast.traces

    assert run_ranks(run, ranks) == [1] * ranks


@pytest.mark.parametrize("declared", [False, True])
def test_a_number_of_python_that_an_update_changes_is_refused(declared: bool) -> None:
    """It would go on in a graph where an update is skipped."""
    counts = lambda grads, state, params: (grads, {"m": grads, "n": state["n"] + 1})
    own = fz.GradientTransformation(functools.partial(begun, 0), counts, elementwise=declared)
    step = fz.train_step(loss, own)
    state, _ = step(step.init(PARAMS), X)
    with pytest.raises(TypeError, match=r"has the number 1, and 2 after an update.*Begin with torch.zeros\(\(\)\)"):
        fz.jit(lambda state, x: step(state, x), backend="graph")(state, X)
    assert fz.jit(step, backend="graph")(state, X)[0].step == 2
