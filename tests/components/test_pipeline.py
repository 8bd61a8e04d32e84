"""Pipelines in one process have the bits of one step that accumulates, whatever the schedule and what flows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drawn_pipelines import Case, cases, piped
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero as fz
from fzero.schedules import Schedule
from fzero.testing import strategies

OPTIMIZER = fz.chain(fz.clip_by_global_norm(0.05), fz.adamw(1e-2))


def make(fn: Any) -> fz.Step:
    return fz.train_step(fn, OPTIMIZER)


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Case, Schedule, torch.dtype]:
    schedule = draw(strategies.schedules())
    case = draw(cases(schedule.stages))
    return case, schedule.computes, draw(st.sampled_from([torch.float32, torch.float64]))


def assert_same(got: Any, want: Any) -> None:
    """To the bit, with one structure."""
    fz.testing.assert_trees_close(got, want, rtol=0, atol=0)


def pair(case: Case, schedule: Schedule, dtype: torch.dtype) -> tuple[Any, Any, Any, Any, list[torch.Tensor]]:
    """The pipeline and the step that accumulates, their states, and a batch."""
    pipe, whole = piped(case, schedule, make), fz.accumulate(make(case.whole), schedule.microbatches)
    params = case.params(dtype)
    return pipe, whole, pipe.init(params), whole.init(params), case.batch(2 * schedule.microbatches, dtype)


@settings(max_examples=60)
@given(drawn(), st.booleans())
def test_vjp_and_forward(one: Any, retain: bool) -> None:
    case, schedule, dtype = one
    pipe, whole, state, other, batch = pair(case, schedule, dtype)
    out, pullback = pipe.vjp(state, *batch)
    want, pull = whole.vjp(other, *batch)
    assert_same(out, want)
    assert_same(pipe.forward(state, *batch), want)
    cotangent = torch.utils._pytree.tree_map(lambda x: torch.cos(x.detach()), want)
    for again in (True, False) if retain else (False,):
        grads, cotangents = pullback(cotangent, retain_graph=again)
        expected, ours = pull(cotangent, retain_graph=again)
        assert_same(list(cotangents), list(ours))
        assert_same(list(fz.gather(grads)), fz.gather(expected))
    with pytest.raises(RuntimeError, match=r"used up by an earlier call"):
        pullback(cotangent)


@settings(max_examples=60)
@given(drawn(), st.data())
def test_steps(one: Any, data: Any) -> None:
    case, schedule, dtype = one
    pipe, whole, state, other, batch = pair(case, schedule, dtype)
    cotangent = None
    if case.stages[-1].gives != "loss":
        cotangent = torch.utils._pytree.tree_map(torch.sin, whole.forward(other, *batch))
    for _ in range(2):
        state, metrics = pipe(state, *batch, cotangent=cotangent)
        other, expected = whole(other, *batch, cotangent=cotangent)
        assert_same(metrics, expected)
    assert_same(list(fz.gather(state.params)), fz.gather(other.params))
    assert state.step == other.step == 2


@settings(max_examples=25)
@given(drawn(), st.data())
def test_argnums(one: Any, data: Any) -> None:
    case, schedule, dtype = one
    pipe, whole, state, other, batch = pair(case, schedule, dtype)
    numbers = data.draw(st.lists(st.integers(0, len(batch) - 1), unique=True))
    _, pullback = pipe.vjp(state, *batch, argnums=numbers)
    want, pull = whole.vjp(other, *batch, argnums=numbers)
    cotangent = torch.utils._pytree.tree_map(torch.ones_like, want)
    assert_same(list(pullback(cotangent)[1]), list(pull(cotangent)[1]))
