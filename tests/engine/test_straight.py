"""Units whose operations are a part of the run's own graph: every step against the same by hand, in float64."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from nightly import by_day, in_turns
from straight_programs import (
    F64,
    KINDS,
    MEMORIES,
    RATE,
    SHARDS,
    STEPS,
    TRANSFORMS,
    UNITS,
    Program,
    batch,
    bent,
    check,
    counting,
    in_unit,
    passes,
    taken,
)

import fzero as fz
from fzero.engine.straight import StraightOp
from fzero.testing import assert_trees_close, run_ranks

pytestmark = pytest.mark.usefixtures("hazards")  # buffers that are not there are seen


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StraightOp, "applied", counting)


def programs() -> st.SearchStrategy[Program]:
    action = st.tuples(st.sampled_from(sorted(KINDS)), st.integers(0, len(UNITS) - 1), st.integers(0, 2))
    return st.builds(
        Program,
        st.lists(action, min_size=1, max_size=3).map(tuple),
        st.tuples(st.integers(1, 3), st.integers(1, 3), st.just(3)),  # of which some transforms are of one
        st.booleans(),
        st.tuples(
            st.sampled_from(SHARDS).map(lambda name: [name]),
            st.lists(st.sampled_from(MEMORIES), max_size=1),
            st.lists(st.sampled_from(sorted({*TRANSFORMS}.difference(SHARDS, MEMORIES))), unique=True, max_size=3),
        )
        .flatmap(lambda drawn: st.permutations([*itertools.chain(*drawn)]))
        .map(tuple),
        st.integers(0, STEPS),
    ).map(lambda drawn: drawn._replace(mapped=STEPS) if "recomputes" in str(drawn.actions) else drawn)


@by_day(16)
@example(Program((("derives_by_its_output", 1, 1),)), 2)
@example(Program((("writes", 2, 0), ("hooks", 0, 1)), transforms=("fuse_update", "shard_zero3", "freeze")), 2)
@given(program=programs(), world=st.integers(1, 3))
def test_drawn_programs(program: Program, world: int) -> None:
    check(program, world)


@in_turns(4)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind(kind: str) -> None:
    check(Program(((kind, 1, 1), ("calls", 3, 2), (kind, 2, 0))), 2)


def test_a_view_of_its_input() -> None:
    """What it is a view of ends no unit: its cotangent comes in passes that have nothing to do with the call."""
    check(Program((("derives_once", UNITS.index(passes), 1),)), 2)


@in_turns(4, "on processes, as on threads")
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("transforms", [("shard_zero3",), ("donate", "offload", "shard_zero3", "accumulate")], ids=str)
def test_on_processes(world: int, transforms: tuple[str, ...]) -> None:
    actions = ("orders", 0, 0), ("skips", 1, 1), ("derives", 3, 2), ("derives_by_its_output", 1, 0)
    check(Program(actions, transforms=transforms), world, backend="processes")


# ---- calls that are no part of the graph around them


class Box:
    """Holds what a unit changes."""

    def __init__(self, x: torch.Tensor | None = None) -> None:
        self.x = x


fz.register_carrier(Box, lambda box: ((box.x,), None), lambda _, children: Box(*children))


def carries(q: Any, box: Box, h: torch.Tensor) -> torch.Tensor:
    box.x = h.detach() if box.x is None else box.x + h.detach()
    return bent(q, h) * box.x


def with_a_carrier(p: Any, x: torch.Tensor) -> torch.Tensor:
    box = Box()
    for q in p["blocks"]:
        x = fz.unit(carries)(q, box, x)
    return x.square().sum()


def plainly(p: Any, x: torch.Tensor) -> torch.Tensor:
    for q in p["blocks"]:
        x = fz.unit(bent)(q, x)
    return x.square().sum()


def taken_by(step: fz.Step, run: Callable[..., object]) -> int:
    """How many calls were a part of the graph around them, in three runs on one rank."""

    def rank_main(_: int) -> int:
        state = step.init(Program(()).params)
        taken()
        for n in range(3):
            run(state, batch(0, n))
        return taken()

    return run_ranks(rank_main, 1)[0]


def test_what_is_no_part_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fzero.engine.dispatch.compiled", lambda fn: fn)
    step = fz.shard_zero3(fz.train_step(plainly, fz.sgd(RATE)))
    assert taken_by(step, step) == 6
    assert taken_by(step, step.forward) == 0  # nothing is differentiated
    compiled, carrier = fz.compile(step), fz.shard_zero3(fz.train_step(with_a_carrier, fz.sgd(RATE)))
    assert taken_by(compiled, compiled) == 0
    assert taken_by(carrier, carrier) == 0

    def goes_on(state: Any, x: torch.Tensor) -> None:
        """Another graph leads to what the step is given."""
        step.vjp(state, x.requires_grad_() * 2.0)

    def transformed(state: Any, x: torch.Tensor) -> None:
        torch.func.grad(lambda x: step.vjp(state, x)[0])(x)

    assert taken_by(step, goes_on) == 0
    assert taken_by(step, transformed) == 0

    def strictly(state: Any, x: torch.Tensor) -> None:
        with fz.testing.strict():
            step(state, x)

    assert taken_by(step, strictly) == 0


# ---- what is left of a call


def test_nothing_is_left_of_a_call_without_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function holds the list that its results are put into."""
    made, begin = [], StraightOp.__init__

    def notes(self: StraightOp, *args: Any) -> None:
        begin(self, *args)
        made.append(weakref.ref(self))

    monkeypatch.setattr(StraightOp, "__init__", notes)

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        outs: list[torch.Tensor] = []
        for q in p["blocks"]:
            outs.append(fz.unit(lambda q, x: bent(q, x) * len(outs))(q, x))
        return sum(out.square().sum() for out in outs)  # type: ignore[return-value]

    step = fz.shard_zero3(fz.train_step(loss, fz.sgd(RATE)))

    def lasting() -> Iterator[int]:
        for run in (step, step.vjp, lambda *given: step.vjp(*given)[1](torch.ones((), dtype=F64))):
            made.clear()
            assert taken_by(step, run) > 0
            yield sum(op() is not None for op in made)

    gc.collect()
    gc.disable()
    try:
        assert [*lasting()] == [0, 0, 0]
    finally:
        gc.enable()


def with_a_pass_to_an_end(p: Any, x: torch.Tensor) -> torch.Tensor:
    """It asks for cotangents of outputs alone: nothing of their units is pulled back."""
    for q in p["blocks"]:
        x = fz.unit(bent)(q, x)
        x = x + torch.autograd.grad(x.sin().sum(), x)[0]
    return x.square().sum()


@pytest.mark.parametrize("loss", [plainly, with_a_pass_to_an_end])
def test_which_params_are_there(monkeypatch: pytest.MonkeyPatch, loss: Callable[..., torch.Tensor]) -> None:
    """After a run those of the call that a pullback begins with, after a pullback none. No mode may look at it."""
    step, begin = fz.shard_zero3(fz.train_step(loss, fz.sgd(RATE))), StraightOp.__init__
    made = dict[int, list[StraightOp]]()  # by thread

    def notes(self: StraightOp, *args: Any) -> None:
        begin(self, *args)
        made.setdefault(threading.get_ident(), []).append(self)

    monkeypatch.setattr(StraightOp, "__init__", notes)

    def rank_main(rank: int) -> None:
        state, one = step.init(Program(()).params), torch.ones((), dtype=F64)
        for known in (False, True, True):
            _, pullback = step.vjp(state, batch(rank, 0))
            own = made.pop(threading.get_ident(), [])

            def there() -> list[bool]:  # hazards fill with NaNs what is given back
                return [not full.isnan().all() for op in own for full in op._fulls.values()]

            assert there() == [False, False, True][: 3 * known]
            pullback(one, retain_graph=True)
            assert there() == [False, False, False][: 3 * known]
            pullback(one)
            assert there() == []

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("inner", [False, True])
def test_a_pullback_that_was_used_up(inner: bool) -> None:
    kind = "derives" if inner else "calls"
    program = Program(((kind, 1, 1),))

    def rank_main(_: int) -> None:
        step = fz.shard_zero3(fz.train_step(functools.partial(program.loss, in_unit), fz.sgd(RATE)))
        state, one = step.init(program.params), torch.ones((), dtype=F64)
        for n in range(3):
            _, pullback = step.vjp(state, batch(0, n), n)
            pullback(one, retain_graph=True)
            pullback(one)
            with pytest.raises(RuntimeError, match="was used up by an earlier call"):
                pullback(one)
        assert taken() > 0

    run_ranks(rank_main, 2)


def test_a_unit_that_was_used_up_within_the_function() -> None:
    def loss(p: Any, x: torch.Tensor, times: int) -> torch.Tensor:
        h = torch.sin(fz.unit(bent)(p["blocks"][0], x))
        y = fz.unit(lambda q, h: bent(q, h).sum())(p["blocks"][1], h)
        return h.sum() + sum(torch.autograd.grad(y, h)[0].sum() for _ in range(times))  # type: ignore[return-value]

    def rank_main(_: int) -> None:
        step = fz.shard_zero3(fz.train_step(loss, fz.sgd(RATE)))
        state = step.init(Program(()).params)
        for _ in range(2):
            state, _metrics = step(state, batch(0, 0), 1)
        assert taken() == 2
        with pytest.raises(RuntimeError, match=r"unit 'blocks\.1' was used up by an earlier call"):
            step(state, batch(0, 0), 2)

    run_ranks(rank_main, 2)


def test_a_pullback_that_fails_and_is_called_again() -> None:
    """The pass that failed has left the params of a unit in their place, and comes to no beginning."""
    fails = [False]

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x.clone()

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            if fails[0]:
                raise KeyError("the user's own")
            return cotangent

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            x = fz.unit(lambda q, x: bent(q, Fails.apply(x @ q["w"])))(q, x)
        return x.square().sum()

    def rank_main(_: int) -> None:
        step = fz.shard_zero3(fz.train_step(loss, fz.sgd(RATE)))
        state, one = step.init(Program(()).params), torch.ones((), dtype=F64)
        for _ in range(3):
            _, pullback = step.vjp(state, batch(0, 0))
            want = fz.gather(pullback(one, retain_graph=True)[0])
            fails[0] = True
            with pytest.raises(KeyError), contextlib.suppress(RuntimeWarning):
                pullback(one, retain_graph=True)
            fails[0] = False
            assert_trees_close(fz.gather(pullback(one)[0]), want, rtol=0)
        assert taken() > 0

    run_ranks(rank_main, 1)
