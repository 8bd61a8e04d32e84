"""Tensors that a step comes to by objects, or by an optimizer of the user's own: their derivatives, or an error."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

F64 = torch.float64
PARAMS = {"w": torch.ones(3, dtype=F64)}
X = torch.randn(4, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
RATE = torch.tensor(0.05, dtype=F64)


class Holder:
    """An object with a tensor, and a schedule of it."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def __call__(self, count: int) -> torch.Tensor:
        return self.value * (count + 1)


def scaling(value: torch.Tensor, declared: bool) -> fz.GradientTransformation:
    """An optimizer of the user's own, in optax's shape, that closes over a tensor."""
    update = lambda grads, state, params=None: (pytree.tree_map(lambda g: g * value, grads), state)
    return fz.GradientTransformation(lambda params: (), update, elementwise=declared)


def run(step: Any, scanned: bool = False) -> torch.Tensor:
    state = step.init(PARAMS)
    if scanned:
        state, _ = fz.scan(step, state, [X, X])
    for _ in range(0 if scanned else 2):
        state, _ = step(state, X)
    return step.forward(state, X)  # type: ignore[no-any-return]


def squared(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ p["w"]).square().mean()


def differences(fn: Any) -> torch.Tensor:
    return (fn(RATE + 1e-6) - fn(RATE - 1e-6)) / 2e-6  # type: ignore[no-any-return]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_schedule_that_is_an_object(ranks: int) -> None:
    want = differences(lambda rate: run(fz.train_step(squared, fz.sgd(Holder(rate)))))

    def rank_main(rank: int) -> None:
        shard = fz.shard_zero3 if ranks > 1 else lambda step: step
        got = torch.func.grad(lambda rate: run(shard(fz.train_step(squared, fz.sgd(Holder(rate))))))(RATE)
        assert_trees_close(got, want, rtol=1e-7)

    run_ranks(rank_main, ranks)


@pytest.mark.parametrize("declared", [False, True])
def test_an_optimizer_of_the_users_own(declared: bool) -> None:
    """On ranks its tensor meets whole leaves, of pieces each rank would have a part of the derivative."""

    def own(rate: torch.Tensor) -> Any:
        return fz.train_step(squared, fz.chain(scaling(rate, declared), fz.sgd(0.1)))

    want = differences(lambda rate: run(own(rate)))
    assert_trees_close(torch.func.grad(lambda rate: run(own(rate)))(RATE), want, rtol=1e-7)

    def rank_main(rank: int) -> None:
        sharded = lambda rate: run(fz.shard_zero3(own(rate)))
        assert_trees_close(torch.func.grad(sharded)(RATE), want, rtol=1e-7)

    run_ranks(rank_main, 2)


def test_a_number_of_an_entry_of_the_state() -> None:
    def averaging(rate: torch.Tensor) -> Any:
        extra = fz.Extra(
            "mean",
            f"averaging({rate.shape})",
            lambda params: params.map(torch.clone),
            lambda old, params, applied: old.map(lambda a, b: a + rate * (b - a), params),
        )
        return fz.train_step(squared, fz.sgd(0.1)).with_state(extra)

    def after(step: Any) -> torch.Tensor:
        state = step.init(PARAMS)
        for _ in range(2):
            state, _ = step(state, X)
        return fz.gather(state.extra["mean"])["w"].sum()  # type: ignore[no-any-return]

    want = differences(lambda rate: after(averaging(rate)))
    assert_trees_close(torch.func.grad(lambda rate: after(averaging(rate)))(RATE), want, rtol=1e-7)

    def rank_main(rank: int) -> None:
        with pytest.raises(TypeError, match=r"state\.extra\['mean'\].*is your own.*fz\.ema"):
            torch.func.grad(lambda rate: after(fz.shard_zero3(averaging(rate))))(RATE)

    run_ranks(rank_main, 2)


def of_an_object(rate: torch.Tensor) -> Any:
    holder = Holder(rate)
    return fz.train_step(lambda p, x: squared(p, x) * holder.value, fz.sgd(0.1))


def test_a_function_that_comes_to_a_tensor_by_an_object() -> None:
    want = differences(lambda rate: run(of_an_object(rate)))
    assert_trees_close(torch.func.grad(lambda rate: run(of_an_object(rate)))(RATE), want, rtol=1e-7)
    with pytest.raises(ValueError, match=r"scan: the step comes to a tensor of shape \(\).*expected one that its"):
        torch.func.grad(lambda rate: run(of_an_object(rate), scanned=True))(RATE)

    def rank_main(rank: int) -> None:
        with pytest.raises(
            ValueError, match=r"step: fn comes to a tensor of shape \(\) .* expected one that fn closes"
        ):
            torch.func.grad(lambda rate: run(fz.shard_zero3(of_an_object(rate))))(RATE)

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("make", [fz.sgd, fz.adamw, lambda rate: fz.chain(scaling(rate, True), fz.sgd(rate))])
def test_nothing_is_held_afterwards(make: Any) -> None:
    """An optimizer is made in every call, and its tensors lead to what they were computed of."""
    seen: list[weakref.ref[torch.Tensor]] = []

    def after(rate: torch.Tensor) -> torch.Tensor:
        own = rate * 2
        seen.append(weakref.ref(own))
        return run(fz.train_step(squared, make(own)))

    for _ in range(3):
        torch.func.grad(after)(RATE)
        run(fz.train_step(squared, make(RATE)))
    gc.collect()
    assert [ref() for ref in seen] == [None] * 3


def test_what_a_function_closes_over_differs_between_ranks() -> None:
    def rank_main(rank: int) -> None:
        def loss(rate: torch.Tensor) -> torch.Tensor:
            step = fz.shard_zero3(fz.train_step(lambda p, x: squared(p, x) * rate, fz.sgd(0.1)))
            return step.forward(step.init(PARAMS), X)  # type: ignore[no-any-return]

        with pytest.raises(
            ValueError, match=r"What fn closes over and torch\.func goes on through differ.*as an input"
        ):
            torch.func.grad(loss)(RATE * (1 + rank))

    run_ranks(rank_main, 2)
