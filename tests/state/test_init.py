"""A state from params: copies, laid out anew, and the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fzero as fz
from fzero.testing import run_ranks


def build() -> fz.Step:
    return fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))


def test_ranks_with_other_params_are_told_or_take_those_of_rank_0() -> None:
    def rank_main(rank: int) -> torch.Tensor:
        step, params = fz.shard_zero3(build()), {"w": torch.full((3,), float(rank))}
        with pytest.raises(ValueError, match=r"The params differ between the ranks.*sync=True"):
            step.init(params)
        return fz.gather(step.init(params, sync=True).params)["w"]

    for found in run_ranks(rank_main, 2):
        assert not found.any()


OPTIMIZERS: dict[str, Callable[[int], fz.GradientTransformation]] = {
    "rate": lambda rank: fz.sgd(0.1 * (1 + rank)),
    "tensor": lambda rank: fz.adamw(torch.tensor(0.1 * (1 + rank))),
    "schedule": lambda rank: fz.adamw(fz.warmup_cosine(0.1, 5, 20 + rank)),
    "NumPy's": lambda rank: fz.sgd(np.float64(0.1 * (1 + rank))),
    "decay": lambda rank: fz.adamw(0.1, weight_decay=0.1 + rank),
    "bound": lambda rank: fz.chain(fz.clip_by_global_norm(1.0 + rank), fz.sgd(0.1)),
    "pattern": lambda rank: fz.partition({"w": fz.sgd(0.1 + rank)}),
    "in a whole": lambda rank: fz.whole(fz.from_torch(torch.optim.Adam, 0.1, eps=1e-8 * (1 + rank))),
}


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_ranks_whose_optimizers_have_other_numbers_are_told(kind: str) -> None:
    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(lambda p, x: (p["w"] * x).sum(), OPTIMIZERS[kind](rank)))
        with pytest.raises(
            ValueError, match=r"The optimizers differ between the ranks.*one that was made with .*Make it with"
        ):
            step.init({"w": torch.ones(3)})
        same = fz.shard_zero3(fz.train_step(lambda p, x: (p["w"] * x).sum(), OPTIMIZERS[kind](0)))
        same(same.init({"w": torch.ones(3)}), torch.ones(3))

    run_ranks(rank_main, 2)


def test_an_optimizer_that_takes_over_is_compared_too() -> None:
    def rank_main(rank: int) -> None:
        one, other = [
            fz.shard_zero3(fz.train_step(lambda p: p["w"].sum(), fz.sgd(lr))) for lr in (0.1, 0.1 * (1 + rank))
        ]
        with pytest.raises(ValueError, match=r"step: The optimizers differ between the ranks"):
            other(one.init({"w": torch.ones(3)}))

    run_ranks(rank_main, 2)


def test_what_a_function_of_ones_own_holds_is_its_own() -> None:
    def rank_main(rank: int) -> None:
        seen = [rank]

        def update(grads: Any, state: object, params: object) -> tuple[object, object]:
            seen.append(rank)
            return {path: -0.1 * g for path, g in grads.items()}, state

        own = fz.GradientTransformation(lambda p: (), update, elementwise=True)
        step = fz.shard_zero3(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.chain(own, fz.sgd(-1.0))))
        step(step.init({"w": torch.ones(3)}), torch.ones(3))

    run_ranks(rank_main, 2)


OPTIONS, SHARED = [("eps", 1e-6), ("amsgrad", True)], fz.sgd(0.1)
EQUAL: dict[str, Callable[[int], fz.GradientTransformation]] = {
    "int": lambda rank: fz.sgd(1 if rank else 1.0),
    "NumPy's": lambda rank: fz.sgd(np.float64(0.1) if rank else 0.1),
    "tensor": lambda rank: fz.sgd(torch.tensor(0.5) if rank else 0.5),
    "order": lambda rank: fz.from_torch(
        torch.optim.Adam, 0.1, **dict([("eps", 1e-6), ("amsgrad", True)][:: 2 * rank - 1])
    ),
    "shared": lambda rank: fz.partition({"w": SHARED, "b": SHARED if rank else fz.sgd(0.1)}),
}


@pytest.mark.parametrize("kind", list(EQUAL))
def test_equal_numbers_of_other_kinds_are_equal(kind: str) -> None:
    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(lambda p, x: (p["w"] * x).sum() + p["b"].sum(), EQUAL[kind](rank)))
        step(step.init({"w": torch.ones(3), "b": torch.ones(3)}), torch.ones(3))

    run_ranks(rank_main, 2)
