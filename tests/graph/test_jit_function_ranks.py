"""fz.jit of functions of states on several ranks: the numbers of the function, and the same messages on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nightly import in_turns

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, recorded_collectives, run_ranks

F64 = torch.float64
block = fz.unit(lambda p, x: torch.tanh(x @ p["w"]))


def loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for q in p["blocks"]:
        x = block(q, x)
    return (x @ p["o"] - y).square().mean()


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


PARAMS = {"blocks": [{"w": drawn(4, 4, seed=i) / 2} for i in range(2)], "o": drawn(4, 2)}
STEP = fz.train_step(loss, fz.chain(fz.clip_by_global_norm(0.5), fz.adamw(1e-2)))
Shard = Callable[[fz.Step], fz.Step]


def data(rank: int, rows: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return drawn(rows, 4, seed=10 * rank + seed), drawn(rows, 2, seed=10 * rank + seed + 5)


def two(step: fz.Step, state: fz.TrainState, x: torch.Tensor, y: torch.Tensor) -> Any:
    for _ in range(2):
        state, metrics = step(state, x, y)
    return state, metrics


def after(step: fz.Step, state: fz.TrainState, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    state, _ = two(step, state, x, y)
    return step.forward(state, x, y)


def scanned(step: fz.Step, state: fz.TrainState, x: torch.Tensor, y: torch.Tensor) -> Any:
    return fz.scan(step, state, (torch.stack([x, -x, 2 * x]), torch.stack([y] * 3)))


def by_state(step: fz.Step, state: fz.TrainState, x: torch.Tensor, y: torch.Tensor) -> Any:
    grads = torch.func.grad(lambda state: after(step, state, x, y))(state)
    return dict(grads.params), [dict(tree) for tree in (grads.moments[1].mu, grads.moments[1].nu)]


def by_rate(step: fz.Step, state: fz.TrainState, x: torch.Tensor, y: torch.Tensor) -> Any:
    def trained(rate: torch.Tensor) -> torch.Tensor:
        own = fz.shard_zero3(fz.train_step(loss, fz.adamw(rate)))
        return after(own, own.init(PARAMS), x, y)

    return torch.func.grad(trained)(x.abs().sum() * 0 + 1e-2)


def grads(step: fz.Step, state: fz.TrainState, x: torch.Tensor, y: torch.Tensor) -> Any:
    return step.vjp(state, x, y)[1](torch.ones((), dtype=F64))[0].map(torch.clone)


def pushed(step: fz.Step, state: fz.TrainState, x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.func.jvp(lambda x: after(step, state, x, y), (x,), (y @ y.T @ x,))


def gathered(step: fz.Step, state: fz.TrainState, x: torch.Tensor, y: torch.Tensor) -> Any:
    state, _ = two(step, state, x, y)
    return fz.gather(state.params), fz.global_norm(step.vjp(state, x, y)[1](torch.ones((), dtype=F64))[0])


CASES = {"gathered": gathered, "steps": two, "scan": scanned, "state": by_state, "rate": by_rate, "grads": grads}
CASES["jvp"] = pushed
STAGES: dict[str, Shard] = {
    "zero1": fz.shard_zero1,
    "zero2": fz.shard_zero2,
    "zero3": fz.shard_zero3,
    "accumulated": lambda step: fz.shard_zero2(fz.accumulate(step, 3)),
}


def values(tree: Any) -> Any:
    """A result with its states as the full leaves that they hold."""
    if isinstance(tree, fz.TrainState):
        return fz.gather(tree.params), fz.gather(tree.moments), tree.step, tree.seed
    if isinstance(tree, fz.Sharded):
        return fz.gather(tree)
    return tuple(map(values, tree)) if type(tree) is tuple else tree


def compare(rank: int, name: str, stage: str, backend: str = "graph") -> Any:
    step = STAGES[stage](STEP)
    fn = functools.partial(CASES[name], step)
    fast, state = fz.jit(fn, backend=backend), step.init(PARAMS)
    for seed in range(3):
        got, want = fast(state, *data(rank, seed=seed)), fn(state, *data(rank, seed=seed))
        assert_trees_close(values(got), values(want), rtol=1e-10)
        if isinstance(got, tuple) and isinstance(got[0], fz.TrainState):  # and what it returns goes on
            state = got[0]
            assert state.params.axis is want[0].params.axis
            assert_trees_close(*[values(step(own, *data(rank))) for own in (state, want[0])], rtol=1e-10)
    assert fast.traces == 1
    return fast


OTHERS = [("gathered", "zero1"), ("state", "zero1"), ("scan", "zero2"), ("rate", "accumulated")]


@in_turns(9)  # each day some are drawn in test_jit_drawn_functions.py
@pytest.mark.parametrize(("name", "stage"), [*[(name, "zero3") for name in CASES], *OTHERS])
def test_numbers_of_the_function(name: str, stage: str) -> None:
    run_ranks(functools.partial(compare, name=name, stage=stage), 2, timeout=300)


def test_a_world_of_one() -> None:
    run_ranks(functools.partial(compare, name="steps", stage="zero3"), 1)  # of three in test_messages


def on_processes(rank: int) -> None:
    for name in ("steps", "state"):
        compare(rank, name, "zero3", "inductor")


@in_turns(12, "compiled by torch")
def test_inductor_on_processes() -> None:
    run_ranks(on_processes, 2, backend="processes", timeout=300)


@in_turns(3, "functions on ranks")
def test_messages() -> None:
    """They come in one order on every rank, also where decompositions leave less to do on one without a slice."""

    def main(rank: int) -> Any:
        fast = compare(rank, "steps", "zero3")
        state = fz.shard_zero3(STEP).init(PARAMS)
        with recorded_collectives() as records:
            fast(state, *data(rank))
        with recorded_collectives() as unjitted:
            two(fz.shard_zero3(STEP), state, *data(rank))
        assert len(records) <= len(unjitted)
        return [(operation, str(tag), size) for operation, tag, size in records]

    first, *others = run_ranks(main, 3)
    assert first and all(own == first for own in others)


@in_turns(3, "functions on ranks")
def test_ranks_have_other_signatures() -> None:
    """A rank alone traces, for other shapes or values: the others neither wait for it nor send what it does not."""

    def main(rank: int) -> None:
        step = fz.shard_zero3(STEP)

        def fn(state: fz.TrainState, x: torch.Tensor, y: torch.Tensor, flag: bool) -> Any:
            state, metrics = step(state, x * 2 if flag else x, y)
            return state, 1.5 if flag else metrics["loss"]

        fast, state = fz.jit(fn, backend="graph"), step.init(PARAMS)
        for call in range(5):
            given = *data(rank, rows=3 + rank * (call // 3)), bool(rank) and call % 2 == 1
            got, want = fast(state, *given), fn(state, *given)
            assert type(got[1]) is type(want[1])
            assert_trees_close(values(got), values(want), rtol=1e-10)
        assert fast.traces == (4 if rank else 1)

    run_ranks(main, 2)


@in_turns(3, "functions on ranks")
def test_two_components() -> None:
    def both(step: fz.Step, a: fz.TrainState, b: fz.TrainState, *given: torch.Tensor) -> Any:
        return step(a, *given)[0], step(b, *given)[0]

    def main(rank: int) -> None:
        step = fz.shard_zero3(STEP)
        fast = fz.jit(functools.partial(both, step), backend="graph")
        for _ in range(2):  # others the second time
            states = step.init(PARAMS), step.init(PARAMS)
            for call in range(2):
                got, want = fast(*states, *data(rank)), both(step, *states, *data(rank))
                assert_trees_close(values(got), values(want), rtol=1e-10)
                assert [own.params.axis for own in got] == [own.params.axis for own in states]
                assert got[0].params.axis.identity == states[0].params.axis.identity, call
                states = got
        assert fast.traces == 1

    run_ranks(main, 2)


def test_a_function_without_states_given() -> None:
    """The states that it closes over are on ranks too."""

    def main(rank: int) -> None:
        step = fz.shard_zero3(STEP)
        state = step.init(PARAMS)
        fn = lambda x, y: step.forward(state, x, y)
        fast = fz.jit(fn, backend="graph")
        for seed in range(3):
            assert_trees_equal(fast(*data(rank, seed=seed)), fn(*data(rank, seed=seed)))

    run_ranks(main, 2)


pytestmark = pytest.mark.usefixtures("hazards")


@pytest.mark.parametrize("of", [lambda step: step, lambda step: lambda *given: step(*given)], ids=["step", "function"])
def test_what_one_rank_cannot_trace_is_refused_where_others_have_a_graph(of: Callable[[Any], Any]) -> None:
    def branching(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = loss(p, x, y)
        return out if x.shape[0] == 3 or out > 0 else -out

    def main(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(branching, fz.adamw(1e-2)))
        state, fast = step.init(PARAMS), fz.jit(of(step), backend="graph", fallback=True)
        for rows in (3, 3, 4 - rank):
            state, _ = fast(state, *data(rank, rows))

    with pytest.raises(RuntimeError, match=r"ValueError: jit: .* asks for the value of a tensor"):
        run_ranks(main, 2)
