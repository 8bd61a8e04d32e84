"""Who writes to params in a backward: refused, and if it is done by then, by a state that says so for ever."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
from nightly import by_turns

import fzero as fz
from fzero.testing import assert_trees_equal, hazards, run_ranks

F64 = torch.float64
_writes: contextvars.ContextVar[Callable[[torch.Tensor], object] | None] = contextvars.ContextVar("w", default=None)

library = torch.library.Library("fzero_written", "DEF")


@torch.library.custom_op("fzero_written::grow", mutates_args={"x"})
def grow(x: torch.Tensor) -> None:
    x.mul_(2)


class Scaled(torch.autograd.Function):
    """x * w, whose backward writes to w where somebody says how."""

    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        gradients = cotangent * w, (cotangent * x).sum(0)
        write = _writes.get()
        if write is not None:
            write(w)
        return gradients


@fz.unit
def block(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = fz.name(torch.tanh(x), "h")
    return Scaled.apply(h, p["w"]) * 1.0 + p["b"]  # type: ignore[operator]


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for p in params["blocks"]:
        x = block(p, x)
    return x.square().mean()


def outside(params: Any, x: torch.Tensor) -> torch.Tensor:
    """The same, in no unit."""
    return Scaled.apply(loss(params, x).expand(3, 4), params["head"]).square().mean()  # type: ignore[operator]


PARAMS = {
    "blocks": [{"w": torch.arange(1.0, 5.0, dtype=F64), "b": torch.ones(4, dtype=F64)} for _ in range(2)],
    "head": torch.ones(4, dtype=F64),
}
X = torch.linspace(-1.0, 1.0, 12, dtype=F64).view(3, 4)
WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda w: w.mul_(2),
    "to a view": lambda w: w[1:].zero_(),
    "as out": lambda w: torch.add(w, 1.0, out=w),
    "at places": lambda w: w.__setitem__(0, 3.0),
}
NAMED: Callable[[fz.Step], fz.Step] = lambda step: fz.remat(step, save=("h",))
STEPS: dict[str, Callable[[fz.Step], fz.Step]] = {
    "plain": lambda step: step,
    "names": NAMED,
    "remat": fz.remat,
    "donated": fz.donate,
    "fused, donated": lambda step: fz.fuse_update(fz.donate(step)),
    "accumulated": lambda step: fz.accumulate(step, 3),
    "ZeRO-1": fz.shard_zero1,
    "ZeRO-3": fz.shard_zero3,
    "ZeRO-3, names": lambda step: fz.shard_zero3(NAMED(step)),
    "ZeRO-3, remat": lambda step: fz.shard_zero3(fz.remat(step)),
    "ZeRO-3, fused, donated": lambda step: fz.shard_zero3(STEPS["fused, donated"](step)),
    "ZeRO-3 of leaves outside": lambda step: fz.shard_zero3(fz.with_fn(step, outside)),
}


@pytest.fixture(autouse=True)
def _nothing_is_written() -> Iterator[None]:
    yield
    assert _writes.get() is None


def attempt(step: fz.Step, state: Any, write: Callable[[torch.Tensor], object], by: str) -> str:
    """What a step says whose backward writes; it says something."""
    token = _writes.set(write)
    try:
        with pytest.raises((ValueError, RuntimeError)) as error:
            if by == "a step":
                step(state, X)
            else:
                output, pullback = step.vjp(state, X)
                if by == "halves":
                    pullback.inputs(torch.ones_like(output))
                    pullback.params()
                else:
                    pullback(torch.ones_like(output))
        return str(error.value)
    finally:
        _writes.reset(token)


def copied(state: Any) -> Any:
    """The params, of which no state's buffer is held."""
    return optree.tree_map(torch.clone, fz.gather(state.params))


def rank_main(name: str, how: str, by: str, later: bool) -> None:
    step = STEPS[name](fz.train_step(loss, fz.sgd(0.0)))
    state = step.init(PARAMS)
    before = copied(state)
    if later:
        for _ in range(2):
            state, _metrics = step(state, X)
            if by != "a step":
                output, pullback = step.vjp(state, X)
                pullback(torch.ones_like(output))
    said = attempt(step, state, WRITES[how], by)
    assert "written to in place" in said or "writes in place to" in said or "modified by an inplace" in said, said
    assert "blocks" in said or "head" in said, said
    try:
        found = copied(state)
    except RuntimeError as error:
        assert "wrote to the params of this state" in str(error), error
        return
    assert_trees_equal(before, found)
    assert step.forward(state, X).isfinite()


@pytest.mark.parametrize(("name", "later"), by_turns(sorted(STEPS), [False, True]))
def test_a_state_survives_a_backward_that_writes_to_params_or_says_that_it_did_not(name: str, later: bool) -> None:
    for world_size in (1, 2):
        for by in ("a step", "a pullback"):
            with hazards(0):
                run_ranks(lambda rank, by=by: rank_main(name, "in place", by, later), world_size)


@pytest.mark.parametrize("how", sorted(WRITES))
@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
def test_ways_to_write(how: str, later: bool) -> None:
    for name in ("plain", "names", "ZeRO-3, names", "ZeRO-3 of leaves outside"):
        run_ranks(lambda rank, name=name: rank_main(name, how, "a pullback", later), 2)


@pytest.mark.parametrize("name", ["plain", "ZeRO-3", "ZeRO-3, names"])
def test_in_halves(name: str) -> None:
    for later in (False, True):
        run_ranks(lambda rank, later=later: rank_main(name, "in place", "halves", later), 2)


def test_on_processes() -> None:
    run_ranks(_on_a_process, 2, backend="processes")


def _on_a_process(rank: int) -> None:
    for name in ("names", "ZeRO-3, names"):
        for later in (False, True):
            rank_main(name, "in place", "a step", later)


def test_an_operator_that_says_nothing_in_its_name_is_noticed_afterwards() -> None:
    """By the count of writes, and by no name."""
    step = fz.train_step(loss, fz.sgd(0.0))
    state = step.init(PARAMS)
    said = attempt(step, state, grow, "a step")
    assert "writes in place to leaf 'blocks.0.b' or 'blocks.0.w', which the state did not survive" in said, said
    with pytest.raises(RuntimeError, match="A backward wrote to the params of this state"):
        _ = state.params


def test_what_is_its_own_a_backward_may_write_to() -> None:
    """A cotangent, memory of its own, and a copy of a param."""

    def write(w: torch.Tensor) -> None:
        w.clone().mul_(2)
        torch.zeros(4).add_(1)

    step = NAMED(fz.train_step(loss, fz.sgd(0.1)))
    state, token = step.init(PARAMS), _writes.set(write)
    try:
        found, _ = step(state, X)
    finally:
        _writes.reset(token)
    expected, _ = step(state, X)
    assert_trees_equal(fz.gather(expected.params), fz.gather(found.params))


def test_a_write_of_the_function_kills_a_donated_state() -> None:
    """Not in the first run, where it is refused before it is done."""

    def fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        if _writes.get() is not None:
            with torch.no_grad():
                params["blocks"][0]["w"].mul_(2)
        return loss(params, x)

    step = fz.donate(fz.train_step(fn, fz.sgd(0.0)))
    state = step.init(PARAMS)
    for _ in range(2):
        state, _metrics = step(state, X)
    attempt(step, state, WRITES["in place"], "a step")
    with pytest.raises(RuntimeError, match="The step's function wrote to the params of this state"):
        _ = state.params
