"""Steps in a function that torch.func differentiates, by what does not come to them: as steps outside of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fzero as fz
from fzero.testing import assert_trees_equal, run_ranks

F64 = torch.float64
PARAMS = {"w": torch.eye(4, dtype=F64), "b": torch.ones(4, dtype=F64)}
X = torch.linspace(-1, 1, 24, dtype=F64).view(6, 4)
STEPS: list[Any] = [
    lambda fn: fz.shard_zero1(fz.train_step(fn, fz.sgd(0.1))),
    lambda fn: fz.shard_zero2(fz.train_step(fn, fz.adamw(0.1))),
    lambda fn: fz.shard_zero3(fz.train_step(fn, fz.partition({"w": fz.muon(0.1), "*": fz.sgd(0.1)}))),
    lambda fn: fz.shard_zero3(fz.train_step(fn, fz.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9))),
]


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"] + p["b"]).square().mean()


def check(rank: int) -> None:
    for make in STEPS:
        step = make(loss)

        def updated(state: Any, step: Any = step) -> Any:
            for x in (X, X + rank):
                state, _ = step(state, x)
            return state

        want = updated(step.init(PARAMS))
        given = step.init(PARAMS)
        found = []

        def outer(w: torch.Tensor, step: Any = step, given: Any = given, found: Any = found) -> torch.Tensor:
            state = updated(given)
            found.append(fz.gather(state.params))
            return step.forward(state, X * w)  # type: ignore[no-any-return]

        grad = torch.func.grad(outer)(torch.ones(4, dtype=F64))
        full = fz.gather(want.params)
        assert_trees_equal(found[0], full)
        plain = torch.func.grad(lambda w, full=full: loss(full, X * w))(torch.ones(4, dtype=F64))
        torch.testing.assert_close(grad, plain, rtol=1e-10, atol=0.0)


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_an_update_that_nothing_goes_through(backend: Any) -> None:
    run_ranks(check, 2, backend=backend)
