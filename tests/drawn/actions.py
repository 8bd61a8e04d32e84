"""What is done with a step: every verb once, over a component (the sharded one on its rank, or the plain one)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from drawn.language import BATCH, Action, D, V

F64 = torch.float64
ARGNUMS: list[Any] = [None, 0, (0, 1), (), (1,)]


class Component(Protocol):
    """A step over a state. What it computes it notes in `seen`, in order, as (label, value).

    Calls and numbers name inputs and cotangents: the same for both components, other ones on every rank.
    """

    seen: list[tuple[str, Any]]

    def forward(self, state: Any, call: int) -> None: ...
    def vjp(self, state: Any, call: int, argnums: Any) -> Callable[[int, bool], Any]: ...
    def update(self, state: Any, grads: Any) -> Any: ...
    def add_grads(self, state: Any, grads: Any) -> Any: ...
    def step(self, state: Any, call: int, number: int) -> Any: ...
    def tape(self, state: Any, calls: list[int], number: int, wrt_inputs: bool) -> Any: ...
    def hvp(self, state: Any, grads: Any, call: int) -> None: ...
    def examples(self, state: Any, call: int) -> None: ...
    def params(self, state: Any) -> None: ...


def act(component: Component, action: Action, state: Any, index: int) -> Any:
    """Does one action, and notes the params after it; returns the next state."""
    call, (a, b, c, _) = 10 * index, action.numbers
    verb = action.verb
    if verb == "step":
        for i in range(1 + a % 3):
            state = component.step(state, call + i, call + i)
    elif verb == "vjp":
        pull = component.vjp(state, call, ARGNUMS[a % len(ARGNUMS)])
        state = component.update(state, pull(call, False))
    elif verb == "twice":
        pull = component.vjp(state, call, ARGNUMS[a % 2])
        first = pull(call, True)
        if b % 2:
            component.forward(state, call + 1)
        second = pull(call + 2, False)
        state = component.update(component.add_grads(state, first), second)
    elif verb == "interleaved":
        one, two = component.vjp(state, call, None), component.vjp(state, call + 1, ARGNUMS[b % 2])
        if a % 2:
            one, two = two, one
        first = one(call, False)
        if c % 2:
            component.forward(state, call + 2)
        state = component.update(component.add_grads(state, first), two(call + 1, False))
    elif verb == "forward":
        component.forward(state, call)
        if a % 2:
            component.forward(state, call + 1)
    elif verb == "tape":
        state = component.update(state, component.tape(state, [call + i for i in range(1 + a % 2)], call, bool(b % 2)))
    elif verb == "add":
        grads = component.vjp(state, call, None)(call, False)
        state = component.add_grads(state, grads)
        if a % 2:
            state = component.step(state, call + 1, call + 1)
        else:
            state = component.update(state, component.vjp(state, call + 1, None)(call + 1, False))
    elif verb == "hvp":
        grads = component.vjp(state, call, None)(call, False)
        component.hvp(state, grads, call + 1)
    elif verb == "examples":
        component.examples(state, call)
    else:
        raise AssertionError(verb)
    component.params(state)
    return state


def inputs(seed: int, call: int, rank: int, counted: bool) -> list[Any]:
    """x and y are other ones on every rank; k, by which functions branch, is not."""
    mine = torch.Generator().manual_seed(1_000_003 * seed + 1009 * call + rank)
    shared = torch.Generator().manual_seed(1_000_003 * seed + 1009 * call + 99)
    x, y = torch.randn(2, BATCH, D, generator=mine, dtype=F64)
    k = torch.randint(0, V, (BATCH,), generator=shared)
    return [x.clone(), y.clone(), k, *([call] if counted else [])]


def cotangent(seed: int, number: int, rank: int, place: int, like: torch.Tensor) -> torch.Tensor | None:
    """For one output leaf; None for some that are not the first."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + 1009 * number + 31 * place + rank + 7)
    drawn = torch.randn(like.shape, generator=generator, dtype=like.dtype)
    return None if place and (number + place) % 5 == 0 else drawn
