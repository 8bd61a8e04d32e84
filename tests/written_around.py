"""Functions as people write them: what lies around a unit and is read or written in it without being an argument.

Cases as in `written`.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import torch
from written import CAPTURES, F64, PARAMS, Case, named, pure, refusals

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
    """Reading what is differentiated and lies in an object is refused, whoever catches that."""
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


class Cache:
    def __init__(self, h: torch.Tensor) -> None:
        self.h = h


pytree.register(Cache, lambda cache: ((cache.h,), None), lambda _, children: Cache(*children))


def containers_that_pytrees_know() -> Case:
    @fz.unit
    def unit(q: Any, kept: collections.deque[torch.Tensor], cache: Cache) -> Any:
        new = torch.tanh(kept[-1] @ q["w"])
        return collections.deque([*kept, new], maxlen=2), Cache(cache.h + new.mean())

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        kept, cache = collections.deque([x @ p["head"]], maxlen=2), Cache(x.sum())
        for q in p["blocks"]:
            kept, cache = unit(q, kept, cache)
        return torch.stack([*kept]).square().mean() + cache.h

    return pure(fn)


class Config:
    tau = 1.0

    @contextlib.contextmanager
    def at(self, tau: float) -> Iterator[None]:
        old, Config.tau = Config.tau, tau
        try:
            yield
        finally:
            Config.tau = old


CONFIG = Config()
SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


class Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.tanh else out


def what_is_set_around_a_call() -> Case:
    @fz.unit
    def unit(q: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ q["w"] * Config.tau) * SCALE.get()

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        for i, q in enumerate(p["blocks"]):
            token = SCALE.set(0.5 + i)
            with CONFIG.at(0.5 + i), Doubling() if i == 1 else contextlib.nullcontext():
                x = unit(q, x)
            SCALE.reset(token)
        return x.square().mean()

    return pure(fn)


class Tagged(torch.Tensor):
    factor = 3.0


def tensors_with_attributes() -> Case:
    @fz.unit
    def unit(q: Any, x: Any) -> Any:
        return (torch.tanh(x @ q["w"]) * x.factor).as_subclass(Tagged)

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        h: Any = chain(unit)(p, (x * 1).as_subclass(Tagged))
        return h.square().mean().as_subclass(torch.Tensor)

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
SHARED = ("what is set around a call",)
CASES = named(
    containers_that_pytrees_know,
    what_is_set_around_a_call,
    tensors_with_attributes,
    leaves_that_it_makes_itself,
    a_tangent,
)
REFUSED = refusals((what_an_except_takes, CAPTURES))
