"""Context variables: how they are made, and one with another value inside a block."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
OURS = set[object]()  # this library's


def variable(name: str, default: T) -> contextvars.ContextVar[T]:
    """A variable with a value for each thread."""
    made = contextvars.ContextVar(f"fzero_{name}", default=default)
    OURS.add(made)
    return made


# the axes (`comm.axis.Axis`) that the running step takes means over, one of each process group
averaged: contextvars.ContextVar[tuple[Any, ...]] = variable("averaged", ())
# whether a step's function is running, which plain autograd may differentiate
in_function: contextvars.ContextVar[bool] = variable("in_function", False)
# called where a running function exchanges values between the ranks that its step takes means over
exchanges: contextvars.ContextVar[Callable[[], object] | None] = variable("exchanges", None)
# (how many microbatches the running step takes a mean of, 0 where they have weights; whether it takes one over ranks)
means: contextvars.ContextVar[tuple[int, bool]] = variable("means", (1, False))
# takes (members, axis) of a map that the running function calls, if its step says nothing of that axis
beside: contextvars.ContextVar[Callable[..., object] | None] = variable("beside", None)
# the same axes, where examples are differentiated one by one, which are others on each rank
one_by_one: contextvars.ContextVar[tuple[Any, ...]] = variable("one_by_one", ())
# copies of modules, by their functions, that only the run has which goes on: it leaves nothing in those of other runs
own_copies: contextvars.ContextVar[dict[object, object] | None] = variable("own_copies", None)
# whether units are proven to be pure in their first runs
proves: contextvars.ContextVar[bool] = variable("proves", True)
# the path of the leaf that an optimizer on whole leaves updates
of_one_leaf: contextvars.ContextVar[str] = variable("of_one_leaf", "")


def in_differentiated() -> bool:
    """Tells whether a step's function runs that plain autograd, at least, differentiates."""
    return in_function.get() and torch.is_grad_enabled()


class during(Generic[T]):
    """Inside, a context variable has this value."""

    def __init__(self, variable: contextvars.ContextVar[T], value: T) -> None:
        self.variable, self.value = variable, value

    def __enter__(self) -> None:
        self.token = self.variable.set(self.value)

    def __exit__(self, *_: object) -> None:
        self.variable.reset(self.token)


def within(contexts: Sequence[AbstractContextManager[object]], run: Callable[[], T]) -> T:
    """`run()` inside of these, the first of which is the outermost."""
    if not contexts:
        return run()
    with contexts[0]:
        return within(contexts[1:], run)


# the steps of a function of states that is traced into a graph, in which no value decides anything; None elsewhere
jitting: contextvars.ContextVar[Any] = variable("jitting", None)
