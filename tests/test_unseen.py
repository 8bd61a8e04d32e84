"""Tensors that a step's function comes to in ways that no walk over it finds: right on one rank, or refused."""

from __future__ import annotations

import contextvars
import functools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from nightly import by_turns, in_turns

import fzero as fz
from fzero.testing import RankError, assert_trees_close, run_ranks

F64 = torch.float64
MADE = torch.Generator().manual_seed(0)
X = torch.randn(4, 3, generator=MADE, dtype=F64)
W = torch.randn(3, 2, generator=MADE, dtype=F64)
T = torch.tensor(1.3, dtype=F64)
elementwise = functools.partial(fz.GradientTransformation, elementwise=True)
OF_THREADS: weakref.WeakKeyDictionary[threading.Thread, dict[str, Any]] = weakref.WeakKeyDictionary()


def of_this_thread() -> dict[str, Any]:
    return OF_THREADS.setdefault(threading.current_thread(), {})


class Config(types.ModuleType):
    """A module whose attributes are a rank's own: ranks that are threads would read each other's wrapped tensors."""

    def __getattr__(self, name: str) -> Any:
        return of_this_thread().get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        of_this_thread()[name] = value


OWN: Any = Config("own")
CONFIG: Any = types.ModuleType("config")
VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("scale")
GRADS: dict[str, Callable[..., Any]] = {
    "grad": torch.func.grad,
    "jvp": lambda fn: lambda t: torch.func.jvp(fn, (t,), (torch.ones_like(t),))[1],
}


def loss(scale: Callable[[], Any], p: Any, x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ p["w"]) * scale()).square().mean()


WAYS: dict[str, Callable[[], Any]] = {
    "a module's attribute": lambda: functools.partial(loss, lambda: OWN.scale),
    "a context variable": lambda: functools.partial(loss, VARIABLE.get),
}


def by_an_entry(p: Any, x: torch.Tensor) -> torch.Tensor:
    scales = torch.ones(2, dtype=F64)
    scales[1:] = OWN.scale
    return loss(lambda: scales[1], p, x)


def by_a_map_within(p: Any, x: torch.Tensor) -> torch.Tensor:
    return loss(lambda: torch.vmap(lambda s: s * 1.0)(OWN.scale[None])[0], p, x)


WAYS |= {"an entry that is written": lambda: by_an_entry, "a map within": lambda: by_a_map_within}


HOW = ("step", "scan", "forward")


def run(fn: Any, wrap: Any, how: str, t: torch.Tensor) -> torch.Tensor:
    OWN.scale = t
    token = VARIABLE.set(t)
    try:
        step = wrap(fz.train_step(fn, fz.sgd(0.1)))
        state, total = step.init({"w": W}), torch.zeros((), dtype=F64)
        if how == "scan":
            state, metrics = fz.scan(step, state, [X] * 2)
            return metrics["loss"].sum()
        for _ in range(2 if how == "step" else 0):
            state, metrics = step(state, X)
            total = total + metrics["loss"]
        return total + step.forward(state, X)
    finally:
        VARIABLE.reset(token)


def by_hand(t: torch.Tensor) -> torch.Tensor:
    w, total = W, torch.zeros((), dtype=F64)
    for _ in range(2):
        g, value = torch.func.grad_and_value(lambda w: (torch.tanh(X @ w) * t).square().mean())(w)
        w, total = w - 0.1 * g, total + value
    return total + (torch.tanh(X @ w) * t).square().mean()


@in_turns(2)
@pytest.mark.parametrize(("way", "kind"), by_turns(sorted(WAYS), sorted(GRADS)))
def test_right_on_one_rank_and_refused_in_scans_and_on_several(way: str, kind: str) -> None:
    grad = GRADS[kind]
    assert_trees_close(grad(functools.partial(run, WAYS[way](), lambda s: s, "step"))(T), grad(by_hand)(T), rtol=1e-10)
    for wrap in (lambda s: s, fz.fuse_update, lambda step: fz.accumulate(step, 2)):
        with pytest.raises(ValueError, match="which a transform goes on through, by an object"):
            grad(functools.partial(run, WAYS[way](), wrap, "scan"))(T)

    def rank_main(rank: int, how: str) -> None:
        grad(functools.partial(run, WAYS[way](), fz.shard_zero1, how))(T)

    for how in HOW:
        with pytest.raises(RankError, match=r"(fn|the step) comes to a tensor of shape \(\)"):
            run_ranks(functools.partial(rank_main, how=how), 2)


class Apart:
    """An object of no class that anybody knows."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale


def kept_at_once(t: torch.Tensor, memo: Any, p: Any, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    if "scale" not in memo:
        memo["scale"] = t * 2
    return (x @ p["w"]).square().mean() * memo["scale"]


def used_late(p: Any, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return (x @ p["w"]).square().mean() * (CONFIG.scale if i > 0 else 1.0)


def also_held(t: torch.Tensor, p: Any, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return (x @ p["w"]).square().mean() * CONFIG.scale * t


@pytest.mark.parametrize(
    ("way", "wrap", "kind"),
    by_turns(["cache", "late", "also held", "an object as input"], [lambda step: step, fz.fuse_update], sorted(GRADS)),
)
def test_what_only_a_later_step_comes_to_is_refused_by_a_scan(way: str, wrap: Any, kind: str) -> None:
    def trained(t: torch.Tensor) -> Any:
        CONFIG.scale = t
        fn = {
            "cache": functools.partial(kept_at_once, t, {}),
            "late": used_late,
            "also held": functools.partial(also_held, t),
            "an object as input": lambda p, x, i, own: (x @ p["w"]).square().mean() * own.scale,
        }[way]
        more = (Apart(t),) if way == "an object as input" else ()
        step = wrap(fz.train_step(fn, fz.sgd(0.1)))
        batches = [(X, torch.tensor(i), *more) for i in range(3)]
        return fz.scan(step, step.init({"w": W}), batches)[1]["loss"].sum()

    with pytest.raises(ValueError, match=r"scan: (fn keeps a tensor|the step comes to a tensor) of shape"):
        GRADS[kind](trained)(T)


class Calls:
    def __call__(self, grads: Any, state: Any, params: Any) -> Any:
        return optree.tree_map(lambda g: -CONFIG.rate * g, grads), state


def begun_with(params: Any) -> Any:
    return optree.tree_map(lambda p: torch.zeros_like(p) + CONFIG.rate, params)


def by_what_it_began_with(grads: Any, state: Any, params: Any) -> Any:
    return optree.tree_map(lambda g, m: -m * g, grads, state), state


OPTIMIZERS: dict[str, Any] = {
    "a callable object": elementwise(lambda params: (), Calls()),
    "what it begins with": elementwise(begun_with, by_what_it_began_with),
}


@pytest.mark.parametrize(("optimizer", "kind"), by_turns(sorted(OPTIMIZERS), sorted(GRADS)))
def test_an_optimizer_of_any_make(optimizer: str, kind: str) -> None:
    def trained(wrap: Any, rate: torch.Tensor) -> Any:
        CONFIG.rate = rate
        step = wrap(fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), OPTIMIZERS[optimizer]))
        state = step.init({"w": W})
        for _ in range(2):
            state, _ = step(state, X)
        return step.forward(state, X)

    def plain(rate: torch.Tensor) -> torch.Tensor:
        w, own = W, lambda w: torch.tanh(X @ w).square().mean()
        for _ in range(2):
            w = w - rate * torch.func.grad(own)(w)
        return own(w)

    got = GRADS[kind](functools.partial(trained, lambda step: step))(T)
    assert_trees_close(got, GRADS[kind](plain)(T), rtol=1e-10)
    try:  # a tensor that nobody sees is known to ranks that have a piece of the leaf: loud, where others have none
        found = run_ranks(lambda rank: GRADS[kind](functools.partial(trained, fz.shard_zero3))(T), 2)
    except RankError as error:
        assert "diverged" in str(error) or "begins with a tensor" in str(error)
    else:
        assert_trees_close(found, [got, got], rtol=1e-10)


def averaged(old: Any, params: Any, applied: bool) -> Any:
    return old.map(lambda a, p: VARIABLE.get() * a + (1 - VARIABLE.get()) * p, params)


def test_an_entry_that_is_updated_with_what_nobody_sees() -> None:
    def teacher(wrap: Any, rate: torch.Tensor) -> Any:
        VARIABLE.set(rate)
        step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.sgd(0.3))
        step = wrap(step.with_state(fz.Extra("own", "own", lambda p: p.map(torch.clone), averaged)))
        state, _ = step(step.init({"w": W}), X)
        return step.forward(state.replace(params=state.extra["own"]), X)

    def plain(rate: torch.Tensor) -> torch.Tensor:
        own = lambda w: torch.tanh(X @ w).square().mean()
        return own(rate * W + (1 - rate) * (W - 0.3 * torch.func.grad(own)(W)))

    assert_trees_close(torch.func.grad(functools.partial(teacher, lambda s: s))(T), torch.func.grad(plain)(T))
    with pytest.raises(RankError, match=r"the update of state.extra\['own'\] .*is your own"):
        run_ranks(lambda rank: torch.func.grad(functools.partial(teacher, fz.shard_zero1))(T), 2)


def test_a_scan_of_a_step_whose_function_trains() -> None:
    def trained(t: torch.Tensor, scanned: bool) -> Any:
        def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
            inner = fz.train_step(lambda q, x: (x @ (q["w"] * p["w"])).square().mean(), fz.sgd(t))
            state, _ = inner(inner.init({"w": W}), x)
            return inner.forward(state, x)  # type: ignore[no-any-return]

        step = fz.train_step(fn, fz.sgd(0.1))
        state = step.init({"w": W})
        if scanned:
            state, _ = fz.scan(step, state, [X] * 2)
        for _ in range(0 if scanned else 2):
            state, _ = step(state, X)
        return step.forward(state, X)

    rate = T / 10
    for kind in (*GRADS.values(), lambda fn: lambda t: torch.vmap(fn)(torch.stack([t, 2 * t]))):
        want = kind(functools.partial(trained, scanned=False))(rate)
        assert_trees_close(kind(functools.partial(trained, scanned=True))(rate), want, rtol=1e-10)


def test_tangents_that_differ_between_ranks_are_refused() -> None:
    def rank_main(rank: int) -> None:
        def trained(lr: torch.Tensor) -> Any:
            step = fz.shard_zero3(fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), fz.sgd(lr)))
            return step(step.init({"w": W}), X)[1]["loss"]

        def begun(w: torch.Tensor) -> Any:
            step = fz.shard_zero3(fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), fz.sgd(0.1)))
            return step.forward(step.init({"w": w}), X)

        for fn, at in ((trained, T), (begun, W)):
            with pytest.raises(ValueError, match=r"checksum \d+, a tangent with checksum"):
                torch.func.jvp(fn, (at,), (torch.full_like(at, 1.0 + rank),))

    run_ranks(rank_main, 2)


@fz.unit
def adapted(p: Any, x: torch.Tensor) -> torch.Tensor:
    """A step within a unit: one of its leaves after an update, by its own loss."""
    step = fz.train_step(lambda q, x: torch.tanh(x * q["w"]).sum(-1).square().mean(), fz.sgd(0.1))
    state, metrics = step(step.init(p), x)
    return step.forward(state, x) + metrics["grad_norm"]  # type: ignore[no-any-return]


WRAPS: dict[str, Callable[[Any], Any]] = {
    "remat": fz.remat,
    "zero3": fz.shard_zero3,
    "both": lambda step: fz.remat(fz.shard_zero3(step)),
    "params away": lambda step: fz.offload(step, params="host"),
    "fused": lambda step: fz.fuse_update(fz.remat(step)),
}


@in_turns(3)
@pytest.mark.parametrize("wrap", sorted(WRAPS))
def test_a_step_within_a_unit_that_runs_again(wrap: str) -> None:
    params, x = {"u": [{"w": torch.full((3,), 0.3, dtype=F64)}]}, torch.ones(2, 3, dtype=F64)

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        return adapted(p["u"][0], x)

    def rank_main(rank: int) -> Any:
        step = WRAPS[wrap](fz.train_step(fn, fz.sgd(1.0)))
        state = step.init(params)
        out, pullback = step.vjp(state, x)
        grads, (ct,) = pullback(torch.ones_like(out))
        new, _ = step(state, x)
        moved = params["u"][0]["w"] - fz.gather(new.params)["u"][0]["w"]
        whole = torch.func.grad(lambda tree: step.forward(state.replace(params=tree), x))(state.params)
        jvp = torch.func.jvp(lambda p: step.forward(step.init(p), x), (params,), (params,))[1]
        return [fz.gather(g)["u"][0]["w"] for g in (grads, whole)] + [moved, ct, jvp]

    gradient, of_x = torch.func.grad(fn, argnums=(0, 1))(params, x)
    own = gradient["u"][0]["w"]
    want = [own, own, own, of_x, torch.func.jvp(lambda p: fn(p, x), (params,), (params,))[1]]
    (found,) = run_ranks(rank_main, 1)
    for got, wanted in zip(found, want, strict=True):
        assert_trees_close(got, wanted, rtol=1e-10)


def test_a_step_within_a_unit_whose_activations_are_put_away() -> None:
    params, x = {"u": [{"w": torch.full((3,), 0.3, dtype=F64)}]}, torch.ones(2, 3, dtype=F64)
    step = fz.offload(fz.train_step(lambda p, x: adapted(p["u"][0], x), fz.sgd(1.0)), activations="host")
    with pytest.raises(TypeError, match=r"saved-tensor hooks \(.*a unit under fz\.offload\(activations="):
        step.vjp(step.init(params), x)


@pytest.mark.parametrize("optimizer", [fz.adamw, fz.sgd, fz.lion])
def test_second_derivatives_of_a_scan_in_float32(optimizer: Any) -> None:
    """Kernels and torch's operations differ in last bits, which is no other run."""
    x, w = X.float(), W.float()

    def trained(lr: torch.Tensor) -> Any:
        step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), optimizer(lr))
        return fz.scan(step, step.init({"w": w}), [x] * 4)[1]["loss"].sum()

    assert torch.func.grad(torch.func.grad(trained))(torch.tensor(0.05)).isfinite()
    assert torch.func.jvp(trained, (torch.tensor(0.05),), (torch.tensor(1.0),))[1].isfinite()
