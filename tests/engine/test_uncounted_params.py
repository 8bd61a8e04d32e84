"""Operators that write to leaves of the params and count it nowhere: refused by name before they do, on every rank."""

from __future__ import annotations

import contextvars
import re
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from nightly import NIGHTLY, by_turns, in_turns
from units import forms

import fzero as fz
from fzero.testing import assert_trees_equal, run_ranks

F64 = torch.float64
_runs: contextvars.ContextVar[bool] = contextvars.ContextVar("runs", default=True)


def swallowed(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    try:
        return F.batch_norm(x, mean, variance, training=True)
    except ValueError:
        return x


def embedded(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    return x + F.embedding(torch.zeros(len(x), dtype=torch.long), variance[None], max_norm=0.5)


Norm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
NORMS: dict[str, Norm] = {
    "functional": lambda x, a, b: F.batch_norm(x, a, b, training=True),
    "detached": lambda x, a, b: F.batch_norm(x, a.detach(), b.detach(), training=True),
    "native": lambda x, a, b: torch.native_batch_norm(x, None, None, a, b, True, 0.1, 1e-5)[0],
    "with update": lambda x, a, b: torch.ops.aten._batch_norm_with_update(x, None, None, a, b, 0.1, 1e-5)[0],
    "instance": lambda x, a, b: F.instance_norm(x.t()[None], a, b)[0].t(),
    "embedding": embedded,
    "swallowed": swallowed,
    "as out": lambda x, a, b: torch.sum(x.detach(), 0, out=a.detach()) + x,
    "data": lambda x, a, b: (a.data.add_(1), x)[1],
}
STEPS = forms("plain", "ZeRO-1", "ZeRO-2", "ZeRO-3", "remat", "ZeRO-3, remat", "microbatches") | {
    "names": lambda step: fz.shard_zero3(fz.remat(step, save=("h",))),
    "fused, donated": lambda step: fz.fuse_update(fz.donate(fz.shard_zero3(step))),
}
W = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=F64)
X = torch.linspace(-1.0, 2.0, 24, dtype=F64).view(6, 4)


def params() -> dict[str, Any]:
    own = {"w": W, "mean": torch.zeros(4, dtype=F64), "var": torch.ones(4, dtype=F64)}
    return {"blocks": [own], **own}


def step_of(norm: Norm, in_unit: bool, how: str) -> fz.Step:
    def block(p: Any, x: torch.Tensor) -> torch.Tensor:
        h = fz.name(x @ p["w"], "h")
        return norm(h, p["mean"], p["var"]) if in_unit and _runs.get() else h

    unit = fz.unit(block)

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        h = unit(p["blocks"][0], x)
        h = h if in_unit or not _runs.get() else norm(h, p["mean"], p["var"])
        return (h @ p["w"]).square().mean()

    return fz.freeze(fz.freeze(STEPS[how](fz.train_step(fn, fz.sgd(0.1))), "*mean"), "*var")


def copied(state: Any) -> Any:
    return optree.tree_map(torch.clone, fz.gather(state.params))


VERBS: dict[str, Callable[[fz.Step, Any], object]] = {
    "forward": lambda step, state: step.forward(state, X),
    "vjp": lambda step, state: step.vjp(state, X)[1](torch.ones((), dtype=F64)),
    "step": lambda step, state: step(state, X),
}


REFUSAL = (
    r"(Unit 'blocks\.0'|step: the function|A unit or the step's function) writes to leaf '(blocks\.0\.)?(mean|var)' in "
    r"place, by .*test_uncounted_params\.py.*Params change in step.update only"
)


def refused(name: str, in_unit: bool, how: str) -> None:
    for call in VERBS.values():
        step = step_of(NORMS[name], in_unit, how)
        state = step.init(params())
        before = copied(state)
        for _ in range(2):
            said = attempt(step, state, call)
            assert said is not None and re.match(REFUSAL, said), said
            if name == "functional":
                assert "fz.functional(module, buffers=True)" in said and "fz.carry" in said
        assert_trees_equal(before, copied(state))
        token = _runs.set(False)
        step(state, X)
        _runs.reset(token)


def attempt(step: fz.Step, state: Any, call: Callable[[fz.Step, Any], object]) -> str | None:
    """What a call is refused with, whose frames hold the state."""
    try:
        call(step, state)
    except ValueError as error:
        return str(error)
    return None


FIRST = sorted(NORMS)


@in_turns(6)
@pytest.mark.parametrize(("name", "how"), by_turns(FIRST, STEPS, of=8))
def test_is_refused_by_name_and_the_state_is_as_before(name: str, how: str) -> None:
    for in_unit in (True, False):
        for ranks in (1, 2) if NIGHTLY else (1 + (in_unit + len(name)) % 2,):
            run_ranks(lambda rank, own=in_unit: refused(name, own, how), ranks)
