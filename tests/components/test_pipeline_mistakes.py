"""What one rank does wrong is told to all ranks of a pipeline, and the next call is as if nothing had been."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from nightly import NIGHTLY
from torch.distributed.device_mesh import init_device_mesh

import fzero as fz
from fzero.schedules import Schedule
from fzero.testing import assert_trees_equal, run_ranks

F64 = torch.float64
X = torch.randn(6, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
Y = torch.randn(6, 3, dtype=F64, generator=torch.Generator().manual_seed(2))
PARAMS = [{"w": torch.randn(3, 3, dtype=F64, generator=torch.Generator().manual_seed(i))} for i in range(3)]


def block(p: Any, h: torch.Tensor) -> torch.Tensor:
    return torch.tanh(h @ p["w"])


def head(p: Any, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (h @ p["w"] - y).square().mean()


def pipe_of(
    schedule: Schedule,
    groups: Any = None,
    fns: Sequence[Callable[..., Any]] = (block, block, head),
    shard: Callable[[int, fz.Step], fz.Step] = lambda _, step: step,
    **more: Any,
) -> fz.Pipeline:
    steps = [shard(i, fz.train_step(fn, fz.sgd(0.1))) for i, fn in enumerate(fns)]
    return fz.pipeline(steps, schedule, groups, **more)


# ---- arguments


ONE = torch.ones((), dtype=F64)
# what a pipeline is asked for, of which one rank's arguments are wrong
WRONG: dict[str, Callable[[Any, Any, bool], Any]] = {
    "params": lambda pipe, state, mine: pipe.init(PARAMS[:2] if mine else PARAMS),
    "leaf": lambda pipe, state, mine: pipe.init([{"w": torch.ones(3, 3, dtype=torch.int64)}] * 3 if mine else PARAMS),
    "seed": lambda pipe, state, mine: pipe.init(PARAMS, seed="x" if mine else 0),
    "argnums": lambda pipe, state, mine: pipe.vjp(state, X, Y, argnums=7 if mine else 0),
    "state": lambda pipe, state, mine: pipe(3 if mine else state, X, Y),
    "requires_grad": lambda pipe, state, mine: pipe.vjp(state, X.clone().requires_grad_(mine), Y),
    "rng": lambda pipe, state, mine: pipe.forward(state, X, Y, rng="x" if mine else 0),
    "retain_graph": lambda pipe, state, mine: pipe.vjp(state, X, Y)[1](ONE, retain_graph="x" if mine else True),
    "cotangent": lambda pipe, state, mine: pipe.vjp(state, X, Y)[1](ONE.clone().requires_grad_(mine)),
    "grads": lambda pipe, state, mine: updated(pipe, state, lambda grads: (5 if mine else grads, None)),
    "grad_norm": lambda pipe, state, mine: updated(pipe, state, lambda grads: (grads, -1.0 if mine else None)),
    "rng of a step": lambda pipe, state, mine: pipe(state, X, Y, rng="x" if mine else 0),
}


def updated(pipe: Any, state: Any, given: Callable[[Any], tuple[Any, Any]]) -> Any:
    """By grads, of which all ranks have a part."""
    grads, norm = given(pipe.vjp(state, X, Y)[1](ONE)[0])
    return pipe.update(state, grads, grad_norm=norm)


def one_is_wrong(rank: int, who: int) -> None:
    pipe, whole = pipe_of(schedule := fz.schedules.zero_bubble(3, 3), [[0], [1], [2]]), pipe_of(schedule)
    state, other = pipe.init(PARAMS), whole.init(PARAMS)
    for name, call in WRONG.items():
        begun = time.monotonic()
        with pytest.raises((ValueError, TypeError)) as caught:
            call(pipe, state, rank == who)
        assert time.monotonic() - begun < 5
        assert rank == who or f"rank {who} at place {who} failed" in str(caught.value), (name, caught.value)
        new, metrics = pipe(state, X, Y)
        want, expected = whole(other, X, Y)
        assert_trees_equal(metrics["loss"], expected["loss"])
        assert_trees_equal(fz.gather(new[rank].params), fz.gather(want[rank].params))


@pytest.mark.parametrize("who", [0, 2] if NIGHTLY else [2])
def test_an_argument_that_is_wrong_on_one_rank(who: int) -> None:
    run_ranks(functools.partial(one_is_wrong, who=who), 3, backend="processes")


def test_a_wrong_cotangent_leaves_the_pullback() -> None:
    for schedule in (fz.schedules.gpipe(3, 2), fz.schedules.zero_bubble(3, 2)):
        pipe = pipe_of(schedule)
        state = pipe.init(PARAMS)
        one = torch.ones((), dtype=F64)
        want = pipe.vjp(state, X, Y)[1](one)
        _, pullback = pipe.vjp(state, X, Y)
        for cotangent in ((one, one), torch.ones(3, dtype=F64), one.float(), "one"):
            with pytest.raises((ValueError, TypeError)):
                pullback(cotangent)
        grads, cotangents = pullback(one)
        assert_trees_equal((fz.gather(grads), cotangents), (fz.gather(want[0]), want[1]))
        with pytest.raises(RuntimeError, match="used up by an earlier call"):
            pullback(one)


# ---- places


def one_place_is_not_sharded(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    shard = lambda i, step: step if i else fz.shard_zero1(step, mesh=mesh, axis="dp")
    pipe = pipe_of(fz.schedules.gpipe(2, 1), mesh["pp"], (block, head), shard)
    begun = time.monotonic()
    with pytest.raises(ValueError, match="component 1 is sharded over 1 ranks of its place, of 2"):
        pipe.init(PARAMS[:2])
    assert time.monotonic() - begun < 5


def test_a_place_that_is_not_sharded_is_told_everywhere() -> None:
    run_ranks(one_place_is_not_sharded, 4, backend="processes")


# ---- what stages do


def by_columns(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (p["w"].t() @ x.t()).t()


def summed(p: Any, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (h.sum(0) * p["w"].sum(0) + y.sum(0)).square().mean()


def strides(rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, F64):
        params = [{"w": torch.randn(16, 16, generator=generator).to(dtype)} for _ in range(2)]
        x, y = (torch.randn(64, 16, generator=generator).to(dtype) for _ in range(2))
        pipes = [pipe_of(fz.schedules.gpipe(2, 2), groups, (by_columns, summed)) for groups in ([[1], [0]], None)]
        (new, metrics), (want, expected) = [pipe(pipe.init(params), x, y) for pipe in pipes]
        assert_trees_equal(metrics, expected)
        assert_trees_equal(fz.gather(new[1 - rank].params), fz.gather(want[1 - rank].params))


def test_memory_order_travels() -> None:
    run_ranks(strides, 2, backend="processes")


def hooked(p: Any, h: torch.Tensor) -> torch.Tensor:
    out = h @ p["w"]
    if out.grad_fn is not None:
        out.grad_fn.register_hook(lambda found, _: tuple(None if g is None else 3 * g for g in found))
    return out


@pytest.mark.parametrize("sharded", [False, True])
def test_hooks_on_nodes(sharded: bool) -> None:
    """Halves cannot tell what such a hook does to each of a node's cotangents."""

    def rank_main(rank: int) -> list[torch.Tensor]:
        shard = lambda i, step: fz.shard_zero3(step) if sharded else step
        schedules = (fz.schedules.gpipe(2, 2), fz.schedules.zero_bubble(2, 2), fz.schedules.one_f_one_b(2, 2))
        pipes = [pipe_of(schedule, None, (hooked, head), shard) for schedule in schedules]
        return [pipe(pipe.init(PARAMS[:2]), X, Y)[1]["grad_norm"] for pipe in pipes]

    w, v = (own["w"].clone().requires_grad_() for own in PARAMS[:2])
    head({"w": v}, hooked({"w": w}, X), Y).backward()
    want = torch.stack([own.grad.square().sum() for own in (w, v) if own.grad is not None]).sum().sqrt()
    for found in run_ranks(rank_main, 2 if sharded else 1):
        fz.testing.assert_trees_close(torch.stack(found), want.expand(3), rtol=1e-12, atol=0)
