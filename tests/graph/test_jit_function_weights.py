"""Weights of microbatches in a function's graph: each run weighs anew, and what does not count adds nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nightly import in_turns

import fzero as fz
from fzero.base import pytree
from fzero.testing import assert_trees_close, run_ranks

F64 = torch.float64
block = fz.unit(lambda p, x: torch.tanh(x @ p["w"]))


def loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for q in p["blocks"]:
        x = block(q, x)
    real = (y >= 0).sum()
    return torch.where(y >= 0, (x.sum(-1) - y).square(), 0).sum() / real  # no number where there is none


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


PARAMS = {"blocks": [{"w": drawn(4, 4, seed=i) / 2} for i in range(2)]}
PLAIN = fz.train_step(loss, fz.adamw(1e-2))
STEP = fz.accumulate(PLAIN, 3, weights=lambda x, y: (y >= 0).sum())
COUNTS = [[3, 2, 1], [2, 0, 1], [0, 0, 0], [0, 2, 2]]  # of each call, in each microbatch


def data(call: int, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    counts = COUNTS[(call + rank) % 4] if call != 2 else COUNTS[2]
    y = torch.cat([torch.arange(3) + 1.0 - 9 * (torch.arange(3) >= count) for count in counts])
    return drawn(9, 4, seed=7 * rank + call), y.double()


def two(step: fz.Step, state: fz.TrainState, x: torch.Tensor, y: torch.Tensor) -> Any:
    for _ in range(2):
        state, metrics = step(state, x, y)
    return step.forward(state, x, y), dict(metrics), state


def pulled(step: fz.Step, state: fz.TrainState, x: torch.Tensor, y: torch.Tensor) -> Any:
    out, pullback = step.vjp(state, x, y)
    grads, (by_x, _) = pullback(torch.ones_like(out))
    return out, by_x, step.update(state, grads)[0]


def by_input(step: fz.Step, state: fz.TrainState, x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.func.grad(lambda x: two(step, state, x, y)[0])(x), two(step, state, x, y)[2]


def scanned(step: fz.Step, state: fz.TrainState, x: torch.Tensor, y: torch.Tensor) -> Any:
    state, metrics = fz.scan(step, state, (torch.stack([x, 2 * x]), torch.stack([y, y])))
    return dict(metrics), state


CASES: dict[str, Callable[..., Any]] = {"steps": two, "vjp": pulled, "gradient": by_input, "scan": scanned}
STAGES = {"one": lambda step: step, "zero2": fz.shard_zero2, "zero3": fz.shard_zero3}


def values(result: Any) -> Any:
    *rest, state = result
    flat = pytree.leaves((rest, fz.gather(state.params)))
    return [x.double() if isinstance(x, torch.Tensor) else torch.tensor(x) for x in flat], state.step


@in_turns(4)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stage", STAGES)
def test_numbers_of_the_function(name: str, stage: str) -> None:
    def main(rank: int) -> None:
        step = STAGES[stage](STEP)
        fn = lambda state, x, y: CASES[name](step, state, x, y)
        fast, state = fz.jit(fn, backend="graph"), step.init(PARAMS)
        for call in range(4):
            got, want = values(fast(state, *data(call, rank))), values(fn(state, *data(call, rank)))
            assert got[1] == want[1]
            for own, other in zip(got[0], want[0], strict=True):
                torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-12, equal_nan=True)
        assert fast.traces == 1

    run_ranks(main, 1 if stage == "one" else 2)


def test_what_is_no_weight_is_refused_on_every_rank_in_each_run() -> None:
    def main(rank: int) -> None:
        step = fz.shard_zero2(fz.accumulate(PLAIN, 3, weights=lambda x, y: y.sum()))
        fast = fz.jit(lambda state, x, y: step(state, x, y)[0], backend="graph")
        state = step.init(PARAMS)
        for sign in (1, 1, -1, 1):
            y = data(0)[1].abs() * (sign if rank else 1)
            if sign > 0:
                state = fast(state, data(0, rank)[0], y)
                continue
            with pytest.raises(ValueError, match=r"got -.* for microbatch 0, expected a finite number"):
                fast(state, data(0, rank)[0], y)
        assert fast.traces == 1 and state.step == 3

    run_ranks(main, 2)


def test_numbers_of_python_and_inductor() -> None:
    step = fz.accumulate(PLAIN, 3, weights=lambda x, y: len(y) + y.abs().amax())
    fn = lambda state, x, y: two(step, state, x, y)[:2]
    fast, state = fz.jit(fn), step.init(PARAMS)
    for scale in (1, 2, 1):
        x, y = data(0)
        assert_trees_close(fast(state, scale * x, y), fn(state, scale * x, y), rtol=1e-10)
