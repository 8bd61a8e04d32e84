"""What runs ahead changes no number: also where the order that it expects turns out wrong."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import scenarios
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st
from nightly import NIGHTLY, in_turns

import fzero as fz
from fzero.testing import LiveBytes, assert_trees_close, recorded_collectives, run_ranks

pytestmark = pytest.mark.usefixtures("hazards")  # races show

ONE = torch.ones((), dtype=torch.float64)
ORDERS = [(0, 1, 2), (0, 1, 2), (2, 0), (2, 0), (0, 0, 1, 1), (0, 0, 1, 1), (1,), (), (0, 1, 2)]


def in_order(p: Any, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Calls the units in an order that is an input, so that the one of the last run says little."""
    block = fz.unit(lambda q, x: torch.tanh(x @ q["w"] + q["b"]))
    for i in order:
        x = block(p["blocks"][i], x)
    return (x @ p["head"]["w"]).square().sum()


def follow(rank: int, orders: list[tuple[int, ...]], world: int, remat: bool, checked: bool = True) -> None:
    _, params = scenarios.stack()
    batches = [x for x, _ in scenarios.vector_batches(world)]
    step = fz.shard_zero3(fz.train_step(in_order, fz.sgd(0.1)))
    step = fz.remat(step) if remat else step
    state = step.init(params)
    for order in orders:
        grads = [torch.func.grad(lambda p: in_order(p, x, order))(params) for x in batches]
        mean = pytree.tree_map(lambda *g: torch.stack(g).mean(0), *grads)
        out, pullback = step.vjp(state, batches[rank], order)
        for retain in (True, False):
            got, _ = pullback(ONE, retain_graph=retain)
            assert_trees_close(fz.gather(got), mean, rtol=1e-10)
        assert_trees_close(step.forward(state, batches[rank], order), out, rtol=1e-12)


@given(orders=st.lists(st.lists(st.integers(0, 2), max_size=4).map(tuple), min_size=2, max_size=4), remat=st.booleans())
def test_orders_that_change(orders: list[tuple[int, ...]], remat: bool) -> None:
    run_ranks(functools.partial(follow, orders=orders, world=2, remat=remat), 2)


@in_turns(8, "on processes, as on threads")
@pytest.mark.parametrize(("world", "remat"), [(2, True), (3, False), *([(2, False), (3, True)] if NIGHTLY else [])])
def test_orders_that_change_on_processes(world: int, remat: bool) -> None:
    fn = functools.partial(follow, orders=ORDERS, world=world, remat=remat)
    run_ranks(fn, world, backend="processes")
    run_ranks(fn, world, backend="processes", checked=False)


def left_alone(rank: int, remat: bool) -> None:
    """A head that the loss does not use is gathered ahead of a pullback that never comes; then the function raises."""
    _, params = scenarios.stack(blocks=4)
    block = fz.unit(lambda q, x: torch.tanh(x @ q["w"] + q["b"]))

    def fn(p: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
        h = block(p["blocks"][0], x)
        block(p["blocks"][1], h)
        if fails:
            raise KeyError("the user's own")
        return block(p["blocks"][3], h).sum() + block(p["blocks"][2], h.detach()).detach().sum()

    step = fz.shard_zero3(fz.train_step(fn, fz.sgd(0.1)))
    step = fz.remat(step) if remat else step
    state, x = step.init(params), torch.ones(2, 5, dtype=torch.float64)
    plain = fz.train_step(fn, fz.sgd(0.1))
    want, _ = plain.vjp(plain.init(params), x, False)[1](ONE)
    for _ in range(3):
        with LiveBytes() as live, recorded_collectives() as record:
            out, pullback = step.vjp(state, x, False)
            grads, _ = pullback(ONE)
            del out, pullback
            assert live.now() < 6 * 8 * 128
        assert record
        assert_trees_close(fz.gather(grads), fz.gather(want), rtol=1e-10)
        with pytest.raises(KeyError, match="the user's own"):
            step.vjp(state, x, True)


@in_turns(2)
@pytest.mark.parametrize("remat", [False, True])
def test_units_that_are_not_pulled_back(remat: bool) -> None:
    run_ranks(functools.partial(left_alone, remat=remat), 2)
    run_ranks(functools.partial(left_alone, remat=remat), 2, backend="processes")


def used_twice(rank: int) -> None:
    """A reduction may end late only where autograd does not add it to another: not for a unit that is called twice."""
    _, params = scenarios.stack(blocks=3)
    batches = [x for x, _ in scenarios.vector_batches(2)]
    orders = (0, 1, 0, 2, 1)
    grads = [torch.func.grad(lambda p: in_order(p, x, orders))(params) for x in batches]
    want = pytree.tree_map(lambda *g: torch.stack(g).mean(0), *grads)
    step = fz.shard_zero3(fz.train_step(in_order, fz.sgd(0.1), fz.Policy(reduce=torch.float64)))
    state = step.init(params)
    for _ in range(3):
        _, pullback = step.vjp(state, batches[rank], orders)
        assert_trees_close(fz.gather(pullback(ONE)[0]), want, rtol=1e-10)
        with fz.tape(step, state) as model:
            model(batches[rank], orders).backward()
            assert_trees_close(fz.gather(model.grads()), want, rtol=1e-10)


def test_a_unit_that_is_used_twice() -> None:
    run_ranks(used_twice, 2)
    run_ranks(used_twice, 2, backend="processes")


def the_order_is_remembered(rank: int) -> list[tuple[str, Any]]:
    loss, params = scenarios.stack()
    step = fz.shard_zero3(fz.train_step(loss, fz.sgd(0.1)))
    state, batch = step.init(params), scenarios.vector_batches(1)[0]
    state, _ = step(state, *batch)
    with recorded_collectives() as record:
        step(state, *batch)
    return [(operation, tag) for operation, tag, _ in record]


def test_what_is_in_flight() -> None:
    """The next gather is announced before the current unit's compute, and the last unit is gathered once."""
    gather, reduce = "all_gather", "reduce_scatter"
    assert run_ranks(the_order_is_remembered, 2)[0] == [
        *[(gather, (unit, 0)) for unit in ("", "blocks.0", "blocks.1", "blocks.2")],
        (reduce, ("", 0)),  # the head, as soon as its gradient is there
        (gather, ("blocks.1", 0)),
        (reduce, ("blocks.2", 0)),
        (gather, ("blocks.0", 0)),
        (reduce, ("blocks.1", 0)),
        (reduce, ("blocks.0", 0)),
        ("all_reduce", "the loss"),
        ("all_reduce", "global_norm"),
    ]


def _two_reductions_of_one_buffer(rank: int) -> None:
    from fzero.comm.axis import Axis

    axis = Axis.of(None, "data", None, "a test")
    for step in range(8):
        run = axis.of_next_run(step)
        waits = [run.start_reduce_scatter(torch.full((2,), float(10**i * (1 + rank))), "0/0") for i in range(4)]
        for _, wait in reversed(waits):
            wait()
        assert [out.item() for out, _ in waits] == [1.5, 15.0, 150.0, 1500.0]


def test_two_reductions_of_one_buffer_may_be_in_flight() -> None:
    """One that is delivered, and one that a derivative of a derivative waits for: their messages never meet."""
    run_ranks(_two_reductions_of_one_buffer, 2, backend="processes", timeout=120)
