"""A rank without examples: the numbers are those of the others, and nobody waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

F64 = torch.float64
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
MADE = torch.Generator().manual_seed(0)
PARAMS = {name: {"w": torch.randn(4, 4, generator=MADE, dtype=F64)} for name in ("first", "second")}
X, Y = torch.randn(2, 3, 4, generator=MADE, dtype=F64)
KEPT = torch.tensor([1.0, 0.0, 1.0], dtype=F64)
block = fz.unit(lambda p, x: torch.tanh(x @ p["w"]))


def errors(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (block(p["second"], block(p["first"], x)) - y).square().sum(-1)


def test_of_one_mean_over_all_ranks() -> None:
    grads, want = torch.func.grad_and_value(lambda p: (errors(p, X, Y) * KEPT).sum() / KEPT.sum())(PARAMS)

    def rank_main(rank: int) -> None:
        ax = fz.parallel.axis(None, "dp")
        loss = lambda p, x, y, kept: fz.parallel.weighted_mean(errors(p, x, y), kept, ax)
        step = fz.shard_zero3(fz.train_step(loss, fz.sgd(1.0)))
        own = [x if rank else x[:0] for x in (X, Y, KEPT)]
        state = step.init(PARAMS)
        new, metrics = step(state, *own)
        assert_trees_close([metrics["loss"], step.forward(state, *own)], [want, want], **CLOSE)
        after = {name: {"w": p["w"] - grads[name]["w"]} for name, p in PARAMS.items()}
        assert_trees_close(fz.gather(new.params), after, **CLOSE)

    run_ranks(rank_main, 2)


def total(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return errors(p, x, y).sum()


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_gradients_of_no_examples(backend: str) -> None:
    run_ranks(_no_examples, 2, backend=backend, timeout=30)


def _no_examples(rank: int) -> None:
    step = fz.shard_zero3(fz.train_step(total, fz.sgd(1.0)))
    found = fz.per_example_grads(step, step.init(PARAMS), X[: 3 * rank], Y[: 3 * rank], only="first.*")
    with pytest.raises(ValueError, match=r"got only='nothing', expected a pattern"):
        fz.per_example_grads(step, step.init(PARAMS), X, Y, only="nothing")
    assert found["second"]["w"] is None
    grad = found["first"]["w"]
    assert grad.shape == (3 * rank, 4, 4) and grad.dtype == F64
    for own, x, y in zip(grad, X, Y, strict=False):
        assert_trees_close(own, torch.func.grad(total)(PARAMS, x[None], y[None])["first"]["w"], **CLOSE)


def test_inputs_that_do_not_split_on_one_rank_are_refused_on_all() -> None:
    weights = lambda x, y: len(x)

    def rank_main(rank: int) -> None:
        plain = fz.shard_zero3(fz.train_step(total, fz.sgd(1.0)))
        step = fz.accumulate(plain, 2, weights=weights)
        pipe = fz.pipeline([plain], fz.schedules.gpipe(1, 2), weights=weights, inputs={0: (0, 1)})
        verbs: list[tuple[Any, Any]] = [(step, step.init(PARAMS)), (pipe, pipe.init([PARAMS]))]
        for of, state in verbs:
            for call in (of, of.vjp, of.forward):
                with pytest.raises(ValueError, match=r"got 3 in input 0, 2 in input 1 along the dims that are split"):
                    call(state, X, Y[: 2 + (not rank)])

    run_ranks(rank_main, 2)
