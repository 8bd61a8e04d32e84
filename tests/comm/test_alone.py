"""What happens on one rank alone is told where ranks diverge after it: a refusal, a caught error."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawn_pipelines import Copied
from torch.distributed.device_mesh import init_device_mesh

import fzero as fz
from fzero.comm.divergence import KEPT, failing, need_alike
from fzero.testing import run_ranks

F64 = torch.float64
PARAMS = {"blocks": [{"w": torch.eye(4, dtype=F64)} for _ in range(2)]}
X = torch.ones(3, 4, dtype=F64)


def fails(words: str) -> None:
    with contextlib.suppress(ValueError), failing("it"):
        raise ValueError(words)


class Fails(Copied):
    """The identity, whose backward fails on rank 1."""

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if torch.distributed.get_rank() == 1:
            raise ValueError("no luck")
        return cotangent


def step_of(body: Callable[[Any, torch.Tensor], torch.Tensor]) -> fz.Step:
    block = fz.unit(body)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in params["blocks"]:
            x = torch.tanh(block(p, x * 1.0))
        return x.square().mean()

    return fz.shard_zero3(fz.train_step(loss, fz.sgd(0.1)))


def sends_and_writes(rank: int) -> str:
    axis = fz.parallel.axis(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), "dp")

    def body(p: Any, x: torch.Tensor) -> torch.Tensor:
        if rank == 1:
            x.mul_(2)
        return fz.parallel.sum(x @ p["w"], axis)

    step = step_of(body)
    with pytest.raises((ValueError, RuntimeError)) as error:
        step(step.init(PARAMS), X)
    return str(error.value)


def goes_on_after_a_pullback(rank: int) -> str:
    step = step_of(lambda p, x: Fails.apply(x @ p["w"]))  # type: ignore[no-any-return,operator]
    state = step.init(PARAMS)
    with pytest.raises(RuntimeError) as error:
        try:
            step(state, X)
        except ValueError:
            step.forward(state, X)
    return str(error.value)


Verb = Callable[[fz.Step, fz.TrainState, Callable[[], object]], object]


def goes_on_after(call: Verb, rank: int) -> str:
    fails: list[bool] = []

    def body(p: Any, x: torch.Tensor) -> torch.Tensor:
        if rank == 1 and fails:
            raise OSError("no more disk")
        return x @ p["w"]

    step = step_of(body)
    state = step.init(PARAMS)
    with pytest.raises(RuntimeError) as error:
        try:
            call(step, state, lambda: fails.append(True))
        except OSError:
            fz.gather(state.params)
    return str(error.value)


def by_forward(step: fz.Step, state: fz.TrainState, fail: Callable[[], object]) -> None:
    fail()
    step.forward(state, X)


def by_vjp(step: fz.Step, state: fz.TrainState, fail: Callable[[], object]) -> None:
    fail()
    step.vjp(state, X)


def goes_on_after_a_forward(rank: int) -> str:
    return goes_on_after(by_vjp, rank)


def by_tape(step: fz.Step, state: fz.TrainState, fail: Callable[[], object]) -> None:
    fail()
    with fz.tape(step, state) as model:
        model(X)


def by_hvp(step: fz.Step, state: fz.TrainState, fail: Callable[[], object]) -> None:
    _, pullback = step.vjp(state, X)
    grads, _ = pullback(torch.ones((), dtype=F64))
    fail()
    fz.hvp(step, state, grads, X)


FORWARDS: dict[str, Verb] = {
    "a forward": by_forward,
    "a forward of a tape": by_tape,
    "a product with the Hessian": by_hvp,
}


@pytest.mark.parametrize("what", FORWARDS)
def test_where_a_verb_fails_alone_its_peers_are_told(what: str) -> None:
    for said in run_ranks(functools.partial(goes_on_after, FORWARDS[what]), 2, timeout=30):
        assert f"on rank 1 {what} failed with OSError: no more disk" in said, said


SAID: dict[Callable[[int], str], str] = {
    goes_on_after_a_pullback: "on rank 1 a pullback failed with ValueError: no luck",
    goes_on_after_a_forward: "on rank 1 a forward failed with OSError: no more disk",
}


@pytest.mark.parametrize("backend", ["threads", "processes"])
@pytest.mark.parametrize("program", SAID, ids=lambda program: program.__name__)
def test_what_may_have_led_there_is_told_on_every_rank(program: Callable[[int], str], backend: str) -> None:
    for said in run_ranks(program, 2, backend=backend, timeout=30):
        assert said.startswith("The ranks have diverged: rank 0: "), said
        assert f"What has happened on some ranks alone: {SAID[program]}. That may be why" in said, said
        assert "Let all ranks end, or go on, together. Every rank must call the same units" in said, said


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_what_one_rank_alone_writes_to_is_refused_on_every_rank(backend: str) -> None:
    for said in run_ranks(sends_and_writes, 2, backend=backend, timeout=30):
        assert "Unit 'blocks.0' writes to an input in place, by mul_" in said, said


def test_what_all_ranks_do_alike_is_not_told() -> None:
    def rank_main(rank: int) -> str:
        step = step_of(lambda p, x: x @ p["w"])
        state, _ = step(step.init(PARAMS), X)
        with pytest.raises(RuntimeError) as error:
            step.forward(state, X) if rank == 0 else fz.gather(state.params)
        return str(error.value)

    for said in run_ranks(rank_main, 2):
        assert "The ranks have diverged" in said and "What has happened" not in said, said


def test_the_last_ones_are_kept() -> None:
    def rank_main(rank: int) -> str:
        for number in range(3 * KEPT) if rank == 1 else ():
            fails(f"it was {number}")
        torch.distributed.barrier()
        group = torch.distributed.group.WORLD
        assert group is not None
        with pytest.raises(RuntimeError) as error:
            need_alike(["a", "b"], group)
        return str(error.value)

    for said in run_ranks(rank_main, 2):
        assert said.count("on rank 1 it failed with ValueError: it was") == KEPT and f"it was {3 * KEPT - 1}" in said


def test_one_rank_keeps_nothing() -> None:
    run_ranks(lambda rank: fails("nobody reads it"), 1)
    fails("there is no group")
