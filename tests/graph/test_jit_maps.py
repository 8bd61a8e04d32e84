"""Steps under torch.vmap in a jitted function: each is one region of the graph, whatever its members have apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nightly import in_turns
from torch.utils import _pytree as pytree
from units import F64

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

X = torch.randn(3, 4, 5, dtype=F64, generator=torch.Generator().manual_seed(0))
PARAMS = {"w": torch.randn(5, 5, dtype=F64, generator=torch.Generator().manual_seed(1)), "b": torch.zeros(5, dtype=F64)}
OPTIMIZERS: dict[str, Callable[[], Any]] = {"sgd": lambda: fz.sgd(0.1, momentum=0.9), "adamw": lambda: fz.adamw(0.1)}


def _made(optimizer: str) -> tuple[fz.Step, fz.TrainState]:
    step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"] + p["b"]).square().mean(), OPTIMIZERS[optimizer]())
    step = fz.shard_zero3(step)
    return step, step.init(PARAMS)


def _adapted(step: fz.Step, state: fz.TrainState, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        state, _ = step(state, x)
    return step.forward(state, x)


def _ensemble(step: fz.Step, state: fz.TrainState, x: torch.Tensor) -> Any:
    """Members that go on from one state, each on data of its own."""
    return torch.vmap(lambda own: _adapted(step, state, own))(x)


def _of_one(step: fz.Step, state: fz.TrainState, x: torch.Tensor) -> Any:
    """Members that all see the same data, from params of their own."""
    scales = torch.linspace(0.5, 1.5, 3, dtype=F64)

    def member(scale: torch.Tensor) -> Any:
        params = state.params.map(lambda p: p * scale)
        return _adapted(step, state.replace(params=params), x[0])

    return torch.vmap(member)(scales)


def _meta(step: fz.Step, state: fz.TrainState, x: torch.Tensor) -> Any:
    """MAML: the derivative of what a map of adapted members loses."""
    loss = lambda params: _ensemble(step, state.replace(params=params), x).mean()
    return fz.gather(torch.func.grad(loss)(state.params))


def _twice(step: fz.Step, state: fz.TrainState, x: torch.Tensor) -> Any:
    """A map of maps, over axes that lie elsewhere."""
    inner = torch.vmap(lambda own: _adapted(step, state, own.unsqueeze(0)), in_dims=0)
    return torch.vmap(inner, in_dims=1)(x)


def _inside(step: fz.Step, state: fz.TrainState, x: torch.Tensor) -> Any:
    """Gradients of each member: the derivative is inside of the map, and the function's graph holds the steps."""
    member = lambda params, own: _adapted(step, state.replace(params=params), own)
    grads = torch.vmap(torch.func.grad(member), in_dims=(None, 0))(state.params, x)
    return [x.sum(0) for x in pytree.tree_leaves(grads)]


MAPS = {"ensemble": _ensemble, "of one": _of_one, "meta": _meta, "twice": _twice, "inside": _inside}


@in_turns(5)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("of", MAPS)
def test_is_the_map_without_a_graph(of: str, optimizer: str, ranks: int) -> None:
    def rank_main(rank: int) -> int:
        step, state = _made(optimizer)
        x = X + rank
        want = MAPS[of](step, state, x)
        fast: Any = fz.jit(lambda state, x: MAPS[of](step, state, x), backend="graph")
        for _ in range(3):
            assert_trees_close(fast(state, x), want, rtol=1e-10)
        graph = fast.graph(state, x).graph
        return sum("fzero.region" in str(node.target) for node in graph.nodes)

    for regions in run_ranks(rank_main, ranks):
        assert regions == {"ensemble": 3, "of one": 3, "meta": 3, "twice": 3, "inside": 0}[of], regions


def test_members_draw_numbers_of_their_own() -> None:
    """Also if nothing of a step is mapped."""
    fn = lambda p, x: torch.nn.functional.dropout(x @ p["w"], 0.5).square().mean()
    step = fz.train_step(fn, fz.sgd(0.1))
    state = step.init(PARAMS)

    def many(state: fz.TrainState, x: torch.Tensor) -> torch.Tensor:
        member = lambda own: step.forward(step(state, x[0])[0], own)
        return torch.vmap(member, randomness="different")(x)

    fast = fz.jit(many, backend="graph")
    fast(state, X)
    assert_trees_close(fast(state, X), many(state, X), rtol=1e-10)


def test_what_changes_between_calls_of_one_step() -> None:
    """Variables that its function and its schedule close over, and autocast around one of its calls."""
    factor, rate = 1.0, 0.1
    step = fz.train_step(lambda p, x: (torch.tanh(x @ p["w"]) * factor).sum(), fz.sgd(lambda n: rate))
    state = step.init({"w": PARAMS["w"].float()})

    def calls(state: fz.TrainState, x: torch.Tensor) -> Any:
        nonlocal factor, rate
        mapped = torch.vmap(lambda own: step(state, own)[1])
        factor, rate, losses = 1.0, 0.1, [mapped(x)]
        factor = 2.0
        losses.append(mapped(x))
        rate = 0.2
        losses.append(mapped(x))
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(step(state, x[0])[1])
        return losses

    fast = fz.jit(calls, backend="graph")
    for _ in range(2):  # the second call finds the variables as the first one has left them
        fast(state, X.float())
    assert_trees_close(fast(state, X.float()), calls(state, X.float()), rtol=1e-6)
