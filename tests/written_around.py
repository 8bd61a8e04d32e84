"""Functions as people write them: what lies around a unit and is read or written in it without being an argument.

Cases as in `written`.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from written import F64, PARAMS, Case, named, pure

import fzero as fz
from fzero.base import pytree

Unit = Callable[..., Any]


def chain(unit: Unit, *rest: Any) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def run(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            x = unit(q, x, *rest)
        return x

    return run


def what_an_except_takes() -> Case:
    """Reading what is differentiated and lies in an object begins the unit's call anew, which is no error."""
    held: dict[str, torch.Tensor] = {}

    @fz.unit
    def unit(q: Any, x: torch.Tensor) -> torch.Tensor:
        try:
            scale = held["scale"].square().sum()
        except:  # noqa: E722
            scale = torch.ones((), dtype=F64)
        return torch.tanh(x @ q["w"]) * scale

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        held["scale"] = p["head"]
        out = chain(unit)(p, x)
        held.clear()
        return out.square().mean()

    return pure(fn)


class Stopped(Exception):
    def __init__(self, message: str, value: torch.Tensor) -> None:
        super().__init__(message, value)
        self.double = value * 2


def an_error_that_carries_tensors() -> Case:
    @fz.unit
    def unit(q: Any, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        h = torch.tanh(x @ q["w"])
        seen.append(h * 2)
        raise Stopped("early", h)

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        total: Any = 0.0
        for q in p["blocks"]:
            try:
                unit(q, x, seen)
            except Stopped as error:
                x = error.args[1]
                total = total + error.double.mean()
        return x.square().mean() + total + torch.stack(seen).sum()

    return pure(fn)


class Trace:
    last: torch.Tensor


def its_input_that_it_keeps() -> Case:
    trace = Trace()

    @fz.unit
    def unit(q: Any, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        seen.append(x)
        trace.last = x
        return torch.tanh(x @ q["w"])

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        h, total = x @ p["head"], torch.zeros((), dtype=F64)
        for q in p["blocks"]:
            h = unit(q, h, seen)
            total = total + trace.last.square().mean()
        return h.square().mean() + total + torch.stack(seen).sin().sum()

    return pure(fn)


class Cache:
    def __init__(self, h: torch.Tensor) -> None:
        self.h = h


pytree.register(Cache, lambda cache: ((cache.h,), None), lambda _, children: Cache(*children))


def containers_that_pytrees_know() -> Case:
    @fz.unit
    def unit(q: Any, kept: collections.deque[torch.Tensor], cache: Cache) -> None:
        kept.append(torch.tanh(kept[-1] @ q["w"]))
        cache.h = cache.h + kept[-1].mean()

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        kept, cache = collections.deque([x @ p["head"]], maxlen=2), Cache(x.sum())
        for q in p["blocks"]:
            unit(q, kept, cache)
        return torch.stack([*kept]).square().mean() + cache.h

    return pure(fn)


class Config:
    tau = 1.0
    calls = 0

    @contextlib.contextmanager
    def at(self, tau: float) -> Iterator[None]:
        old, Config.tau = Config.tau, tau
        try:
            yield
        finally:
            Config.tau = old


CONFIG = Config()
SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
CALLS = 0


class Helper:
    def scale(self) -> float:
        global CALLS
        CALLS += 1
        return 1.0 + 0.1 * CALLS


class Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.tanh else out


def what_is_set_around_a_call() -> Case:
    helper = Helper()

    @fz.unit
    def unit(q: Any, x: torch.Tensor) -> torch.Tensor:
        Config.calls += 1
        return torch.tanh(x @ q["w"] * Config.tau) * SCALE.get() * helper.scale() + 0.1 * Config.calls

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        global CALLS
        CALLS = Config.calls = 0
        for i, q in enumerate(p["blocks"]):
            token = SCALE.set(0.5 + i)
            with CONFIG.at(0.5 + i), Doubling() if i == 1 else contextlib.nullcontext():
                x = unit(q, x)
            SCALE.reset(token)
        return x.square().mean() * CALLS * Config.calls

    return pure(fn)


class Conditioning:
    value: Any = None
    runs = 0


def what_begins_in_a_later_run() -> Case:
    @fz.unit
    def unit(q: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ q["w"]) * (1.0 if Conditioning.value is None else Conditioning.value.sum())

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        Conditioning.value, h = p["head"] * 2, x
        for q in p["blocks"]:
            h = unit(q, h)
        Conditioning.value = None
        return unit(p["blocks"][0], h).square().mean()

    return pure(fn)


def generators_and_counters_in_arrays() -> Case:
    @fz.unit
    def unit(q: Any, x: torch.Tensor, of: dict[str, Any]) -> torch.Tensor:
        of["counts"][1] += 1
        k = of["python"].random() + of["numpy"].random() + of["old"].rand() + of["counts"][1]
        of["kept"][0] = torch.tanh(x @ q["w"] / (1.0 + k))
        return of["kept"][0] + 0.1 * of["kept"][1]

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        of: dict[str, Any] = {"counts": np.zeros(3), "kept": np.empty(2, dtype=object)}
        of["kept"][1] = p["head"].sum()
        of |= {"python": random.Random(1), "numpy": np.random.default_rng(2), "old": np.random.RandomState(3)}
        return chain(unit, of)(p, x).square().mean() * of["python"].random() * of["counts"][1]

    return pure(fn)


class Tagged(torch.Tensor):
    factor = 3.0


def tensors_with_attributes() -> Case:
    @fz.unit
    def unit(q: Any, x: Any) -> Any:
        x.seen = getattr(x, "seen", 0) + 1
        out: Any = (torch.tanh(x @ q["w"]) * x.factor).as_subclass(Tagged)
        out.note = [out * 2]
        return out

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        first: Any = (x * 1).as_subclass(Tagged)
        h, total = first, torch.zeros((), dtype=F64)
        for q in p["blocks"]:
            h = unit(q, h)
            total = total + h.note[0].sum()
        return (h.square().mean() * first.seen + total).as_subclass(torch.Tensor)

    return pure(fn)


def leaves_that_it_makes_itself() -> Case:
    """A step of gradient descent inside, from what came in: nothing leads back from it."""

    @fz.unit
    def unit(q: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            fast = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad((fast @ fast.T).sin().sum(), fast, create_graph=True)
        return torch.tanh((x + 0.1 * slope.detach()) @ q["w"])

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        return chain(unit)(p, x @ p["head"]).square().mean()

    def plain(p: Any, x: torch.Tensor) -> torch.Tensor:
        def own(q: Any, x: torch.Tensor) -> torch.Tensor:
            slope = torch.func.grad(lambda y: (y @ y.T).sin().sum())(x.detach())
            return torch.tanh((x + 0.1 * slope.detach()) @ q["w"])

        return chain(own)(p, x @ p["head"]).square().mean()

    return fn, PARAMS, plain


def a_tangent() -> Case:
    """torch.func.jvp of the blocks, inside; ranks that are threads share forward mode."""

    @fz.unit
    def unit(q: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ q["w"])

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        pair: Any = torch.func.jvp(lambda y: chain(unit)(p, y), (x,), (torch.ones_like(x),))
        out, tangent = pair
        return out.square().mean() + (tangent * out).sum()

    return pure(fn)


# those whose state is the process's, which ranks that are threads share
SHARED = ("what is set around a call", "what begins in a later run")
CASES = named(
    what_an_except_takes,
    an_error_that_carries_tensors,
    its_input_that_it_keeps,
    containers_that_pytrees_know,
    what_is_set_around_a_call,
    what_begins_in_a_later_run,
    generators_and_counters_in_arrays,
    tensors_with_attributes,
    leaves_that_it_makes_itself,
    a_tangent,
)
