"""Operators that run functions (torch.cond, while_loop): in a step, and where one looks at it; or refused by name."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nightly import NIGHTLY, in_turns
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

F64 = torch.float64
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=F64)
PARAMS = {"blocks": [{"w": torch.eye(4, dtype=F64) + 0.1 * X}, {"w": torch.eye(4, dtype=F64) - 0.1 * X}]}
Body = Callable[[Any, torch.Tensor], torch.Tensor]


def by_cond(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda y: (y.sin(),), lambda y: (y.cos(),), (x @ p["w"],))[0]


def by_if(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ p["w"]).sin() if x.sum() > 0 else (x @ p["w"]).cos()


def by_while_loop(p: Any, x: torch.Tensor) -> torch.Tensor:
    begin = torch.zeros((), dtype=torch.int64), x.detach()
    return x @ p["w"] + while_loop(lambda n, y: n < 3, lambda n, y: (n + 1, y * 1.5), begin)[1]


def by_while(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ p["w"] + x.detach() * 1.5**3


def by_scan(p: Any, x: torch.Tensor) -> torch.Tensor:
    return scan(lambda c, row: (c + row, (c * row).clone()), torch.zeros(4, dtype=F64), x @ p["w"])[1]


def by_rows(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x @ p["w"]
    return (h.cumsum(0) - h) * h


def by_associative_scan(p: Any, x: torch.Tensor) -> torch.Tensor:
    return associative_scan(lambda a, b: a + b, x @ p["w"], 0, combine_mode="generic")


def by_map(p: Any, x: torch.Tensor) -> torch.Tensor:
    return mapped(lambda row: (torch.tanh(row),), x @ p["w"])[0]  # type: ignore[arg-type]


def by_checkpoint(p: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: torch.tanh(x @ p["w"]), x, use_reentrant=False)


BODIES: dict[str, tuple[Body, Body]] = {
    "cond": (by_cond, by_if),
    "while_loop": (by_while_loop, by_while),
    "scan": (by_scan, by_rows),
    "associative_scan": (by_associative_scan, lambda p, x: (x @ p["w"]).cumsum(0)),
    "map": (by_map, lambda p, x: torch.tanh(x @ p["w"])),
    "checkpoint": (by_checkpoint, lambda p, x: torch.tanh(x @ p["w"])),
}
STEPS: dict[str, Callable[[fz.Step], fz.Step]] = {
    "plain": lambda step: step,
    "remat": fz.remat,
    "ZeRO-3": fz.shard_zero3,
    "ZeRO-1": fz.shard_zero1,
}


def step_of(body: Body, wrap: Callable[[fz.Step], fz.Step] = lambda step: step) -> fz.Step:
    block = fz.unit(body)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in params["blocks"]:
            x = torch.tanh(block(p, x))
        return x.square().mean()

    return wrap(fz.train_step(loss, fz.sgd(0.1)))


def stepped(step: fz.Step) -> Any:
    state = step.init(PARAMS)
    for _ in range(2):
        state, metrics = step(state, X)
    return metrics["loss"], fz.gather(state.params)


def on_rank(name: str, wrap: str, rank: int) -> Any:
    warnings.filterwarnings(
        "ignore", message="The .grad attribute of a Tensor that is not a leaf"
    )  # which Dynamo reads
    step = step_of(BODIES[name][0], STEPS[wrap])
    found = stepped(step)
    report = fz.explain(step, step.init(PARAMS), X)
    assert report.fault is None and report.loss is not None
    bad = {"blocks": [{"w": torch.full((4, 4), float("nan"), dtype=F64)}, PARAMS["blocks"][1]]}
    fault = fz.explain(step, step.init(bad), X).fault
    assert fault is not None and fault.leaf == "blocks.0.w"
    return found


@in_turns(3)
@pytest.mark.parametrize("wrap", sorted(STEPS) if NIGHTLY else ["ZeRO-3"])
@pytest.mark.parametrize("name", sorted(BODIES))
def test_in_a_step_and_where_one_looks_at_it(name: str, wrap: str) -> None:
    """On processes: torch traces a function on one thread at a time."""
    expected = stepped(step_of(BODIES[name][1]))
    for found in run_ranks(functools.partial(on_rank, name, wrap), 2, backend="processes"):
        assert_trees_close(expected, found, rtol=1e-10)


@in_turns(3)
@pytest.mark.parametrize("name", sorted({*BODIES} - {"while_loop"}))
def test_in_a_plan(name: str) -> None:
    for wrap in (lambda step: step, fz.remat):
        plan = fz.plan(step_of(BODIES[name][0], wrap), PARAMS, world_size=1, inputs=(X,))
        assert plan.params == fz.plan(step_of(BODIES["map"][1], wrap), PARAMS, world_size=1).params


def test_what_such_an_operator_makes_of_finite_values_is_found() -> None:
    def body(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() < 1e9, lambda y: ((y - 1e9).log(),), lambda y: (y.cos(),), (x @ p["w"],))[0]

    fault = fz.explain(step_of(body), step_of(body).init(PARAMS), X).fault
    assert fault is not None and (fault.op, fault.unit) == ("cond", "blocks.0")


def without_a_tuple(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x @ p["w"],))


def test_what_torch_runs_only_compiled_is_refused_by_name() -> None:
    said = r"calls a higher-order operator .* that torch does not run here .*Let the operator's functions return tuples"
    for wrap in (lambda step: step, fz.remat, lambda step: fz.remat(step, save=())):
        step = step_of(without_a_tuple, wrap)
        state = step.init(PARAMS)
        for run in (
            lambda step=step, state=state: step(state, X),
            lambda step=step, state=state: fz.explain(step, state, X),
            lambda step=step: fz.plan(step, PARAMS, world_size=1, inputs=(X,)),
        ):
            with pytest.raises(TypeError, match=said):
                run()
    with pytest.raises(TypeError, match=r"parallel.check: the function calls a higher-order"):
        fz.plan(step_of(by_while_loop), PARAMS, world_size=1, inputs=(X,))


def test_an_error_of_a_users_function_is_his_own() -> None:
    def body(p: Any, x: torch.Tensor) -> torch.Tensor:
        def branch(y: torch.Tensor) -> tuple[torch.Tensor]:
            raise OSError("no more disk")

        return torch.cond(x.sum() > 0, branch, branch, (x @ p["w"],))[0]

    step = step_of(body, fz.remat)
    with pytest.raises(Exception, match="no more disk"):
        step(step.init(PARAMS), X)
