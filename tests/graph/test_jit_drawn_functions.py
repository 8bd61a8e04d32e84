"""fz.jit of drawn functions: the numbers of the function without it, and of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero as fz
from fzero.base import pytree
from fzero.testing import assert_trees_close, run_ranks

POLICIES: dict[str, fz.Policy | None] = {
    "own": None,
    "moments in bf16": fz.Policy(moment=torch.bfloat16),
    "params in bf16": fz.Policy(param=torch.bfloat16, compute=torch.float32),
}
WRAPS: dict[str, Callable[[fz.Step], fz.Step]] = {
    "plain": lambda step: step,
    "remat": fz.remat,
    "accumulated": lambda step: fz.accumulate(step, 3),
}
STAGES: list[Callable[[fz.Step], fz.Step]] = [lambda step: step, fz.shard_zero1, fz.shard_zero2, fz.shard_zero3]


@dataclass
class Drawn:
    steps: int
    scans: bool
    by: str  # what it is differentiated by, "" for the trained params and losses
    dropout: float
    policy: str
    stage: int
    world: int
    unit: bool
    wrap: str
    seeds: tuple[int, ...] = (0, 0, 0)


DRAWN = st.builds(
    Drawn,
    steps=st.integers(1, 3),
    scans=st.booleans(),
    by=st.sampled_from(["", "input", "rate", "state"]),
    dropout=st.sampled_from([0.0, 0.5]),
    policy=st.sampled_from(sorted(POLICIES)),
    stage=st.integers(0, 3),
    world=st.integers(1, 2),
    unit=st.booleans(),
    wrap=st.sampled_from(sorted(WRAPS)),
    seeds=st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3),
)


def params_of(dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=dtype, generator=generator) / 2
    return {"blocks": [{"w": draw(4, 4)}, {"w": draw(4, 4)}], "o": draw(4, 2)}


def loss_of(case: Drawn) -> Callable[..., torch.Tensor]:
    def block(p: Any, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.tanh(x @ p["w"]), case.dropout)

    only_there = case.stage == 3 or case.wrap == "remat"  # leaves of units are gathered
    called = fz.unit(block) if case.unit or only_there else block

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            x = called(q, x)
        return (x @ p["o"]).square().mean()

    return loss


def compare(case: Drawn, rank: int) -> None:
    dtype = torch.float64 if case.policy == "own" else torch.float32
    loss, params = loss_of(case), params_of(dtype)
    batches = [torch.randn(3, 4, dtype=dtype, generator=torch.Generator().manual_seed(10 * rank + i)) for i in range(3)]
    rates = [torch.tensor(rate, dtype=torch.float64) for rate in (0.1, 0.2, 0.1)]

    def step_of(rate: Any) -> fz.Step:
        stage = STAGES[case.stage] if case.world > 1 else STAGES[0]
        step = fz.train_step(loss, fz.sgd(rate, momentum=0.9), policy=POLICIES[case.policy])
        return stage(WRAPS[case.wrap](step))

    def trained(state: fz.TrainState, x: torch.Tensor, rate: torch.Tensor) -> Any:
        step = step_of(rate)
        if case.scans:
            return fz.scan(step, state, [x * i for i in range(1, case.steps + 1)])[0]
        for i in range(case.steps):
            state, _ = step(state, x * (i + 1))
        return state

    def after(state: fz.TrainState, x: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
        return step_of(rate).forward(trained(state, x, rate), x)

    place = ["state", "input", "rate"].index(case.by) if case.by else None
    fn = trained if place is None else torch.func.grad(after, argnums=place)
    fast, state = fz.jit(fn, backend="graph"), step_of(0.1).init(params)
    near = {"rtol": 1e-10, "atol": 1e-14} if case.policy == "own" else {"rtol": 1e-3, "atol": 1e-4}
    for x, rate, seed in zip(batches, rates, case.seeds, strict=True):
        state = state.replace(seed=seed)
        before = torch.random.get_rng_state()
        got, want = fast(state, x, rate), fn(state, x, rate)
        assert torch.equal(before, torch.random.get_rng_state())
        both = [fz.gather(own.params) if isinstance(own, fz.TrainState) else own for own in (got, want)]
        assert_trees_close(*both, **near)
        if case.policy == "own" and not case.dropout and case.by in ("input", "rate") and case.world == 1:
            torch.testing.assert_close(got, plainly(case, loss, params, x, rate), rtol=1e-10, atol=1e-14)
    assert fast.traces == 1


def plainly(case: Drawn, loss: Any, params: Any, x: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
    """The gradient, in torch alone."""
    flat, spec = pytree.flatten(params)
    moved = {"input": x, "rate": rate}
    moved[case.by] = moved[case.by].clone().requires_grad_()
    own, moments = [p.clone().requires_grad_() for p in flat], [torch.zeros_like(p) for p in flat]
    value = lambda own, x: loss(pytree.unflatten(spec, own), x)
    for i in range(case.steps):
        grads = torch.autograd.grad(value(own, moved["input"] * (i + 1)), own, create_graph=True)
        moments = [0.9 * m + g for m, g in zip(moments, grads, strict=True)]
        own = [p - moved["rate"] * m for p, m in zip(own, moments, strict=True)]
    return torch.autograd.grad(value(own, moved["input"]), moved[case.by])[0]


@settings(max_examples=8)
@given(case=DRAWN)
def test_drawn_functions(case: Drawn) -> None:
    run_ranks(lambda rank: compare(case, rank), case.world, timeout=300)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_members_draw(randomness: str) -> None:
    case = Drawn(1, False, "", 0.5, "params in bf16", 0, 1, True, "plain")
    step = fz.train_step(loss_of(case), fz.sgd(0.1), policy=POLICIES[case.policy])
    members = fz.stack([step.init(params_of(torch.float32), seed=7) for _ in range(3)])
    fn = torch.vmap(step, in_dims=(0, None), randomness=randomness)
    fast, x = fz.jit(fn, backend="graph"), torch.ones(3, 4)
    for _ in range(3):
        (got, _), (want, _) = fast(members, x), fn(members, x)
        found, wanted = [[dict(each.params) for each in fz.unstack(state)] for state in (got, want)]
        assert_trees_close(found, wanted, rtol=0.0, atol=0.0)
        members = want
    assert fast.traces <= 2  # codes the first time, and values from then on


pytestmark = pytest.mark.usefixtures("hazards")
