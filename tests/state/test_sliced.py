"""fz.convert between cuts over a tensor axis: any degree, dim and parts to any other, to the bit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import sliced_states as sliced
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks


def converted(rank: int, leaves: sliced.Shapes, chain: tuple[sliced.Over | None, ...], policy: str) -> None:
    """A state goes through a chain of steps, and is what it was."""
    steps = [sliced.step_over(over, leaves, sliced.POLICIES[policy]) for over in chain]
    dtype = torch.float64 if policy == "float64" else torch.float32
    state = sliced.trained(steps[0], sliced.params(leaves, dtype))
    want, own = sliced.whole(state), state
    for step in steps[1:]:
        state = fz.convert(state, step)
        sliced.same_bits(sliced.whole(state), want)
    for key in own.params.groups:
        for part, other in zip(state.params.stored(key).parts, own.params.stored(key).parts, strict=True):
            assert torch.equal(part, other)


@st.composite
def chains(draw: st.DrawFn, blocks: bool) -> tuple[sliced.Shapes, tuple[sliced.Over | None, ...]]:
    leaves = draw(sliced.shapes(blocks=blocks))
    first = draw(sliced.overs(leaves, blocks=blocks))
    others = st.one_of(st.none(), sliced.overs(leaves, ranks=first.ranks, blocks=blocks))
    return leaves, (first, *draw(st.lists(others, min_size=1, max_size=3)), first)


@st.composite
def cut_leaves(draw: st.DrawFn) -> tuple[sliced.Shapes, sliced.Over]:
    leaves = draw(sliced.shapes())
    over = draw(sliced.overs(leaves))
    return leaves, over._replace(data=1, stage=0) if over.data == 3 else over  # a third of three alike is not exact


def with_policies(cases: Callable[[bool], st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Cases with a policy each; one whose elements share scales where blocks of them stay together."""
    policies = {False: sliced.ELEMENTWISE, True: ["8-bit", "4-bit"]}
    return st.booleans().flatmap(lambda blocks: st.tuples(cases(blocks), st.sampled_from(policies[blocks])))


@pytest.mark.usefixtures("hazards")
@example(  # one dim that is cut in other parts, and two dims
    case=(
        (
            ((4, 7), (3, 6, 2)),
            (
                sliced.Over(1, 2, 0, (sliced.Cut(1), sliced.Cut(1, (4, 2)))),
                sliced.Over(1, 2, 0, (sliced.Cut(1, (2, 5)), sliced.Cut(2))),
                sliced.Over(1, 2, 0, (sliced.Cut(0), sliced.Cut(1))),
                sliced.Over(1, 2, 0, (sliced.Cut(1), sliced.Cut(1, (4, 2)))),
            ),
        ),
        "float64",
    )
)
@given(case=with_policies(chains))
def test_any_cut_becomes_any_other(case: Any) -> None:
    (leaves, overs), policy = case
    run_ranks(functools.partial(converted, leaves=leaves, chain=overs, policy=policy), overs[0].ranks)


def after_steps(rank: int, leaves: sliced.Shapes, over: sliced.Over | None, policy: str) -> Any:
    dtype = torch.float64 if policy == "float64" else torch.float32
    step = sliced.step_over(over, leaves, sliced.POLICIES[policy])
    return sliced.whole(sliced.trained(step, sliced.params(leaves, dtype), steps=3))


@pytest.mark.usefixtures("hazards")
@given(case=cut_leaves(), policy=st.sampled_from(["float64", "float32", "exact", "bf16"]))
def test_rounded_to_the_same_bits_at_any_degree(case: Any, policy: str) -> None:
    """Stochastic rounding alone draws numbers of its own for each slice."""
    leaves, over = case
    want = after_steps(0, leaves, None, policy)
    for got in run_ranks(functools.partial(after_steps, leaves=leaves, over=over, policy=policy), over.ranks):
        sliced.same_bits(got, want)


def regularised(rank: int, leaves: sliced.Shapes, over: sliced.Over | None, units: tuple[str, ...] | None) -> Any:
    """A function of whole leaves that is no sum over their slices, and its second derivatives."""
    step = sliced.step_over(over, leaves, None)
    places = lambda w: torch.arange(1, w.numel() + 1, dtype=w.dtype).view(w.shape)  # which leaf it is, in its order
    norms = lambda p, x: fz.sum_over(p, lambda w: ((w * places(w)).square().sum() + 0.1).sqrt()) * x.sum()
    step = dataclasses.replace(fz.with_fn(step, norms), units=units)
    state = step.init(sliced.params(leaves))
    x = torch.ones(2, dtype=torch.float64)
    v, _ = step.vjp(state, x)[1](torch.ones((), dtype=torch.float64))
    second = fz.hvp(step, state, v, x)
    state, metrics = step(state, x)
    return [fz.gather(tree) for tree in (v, second, state.params)], metrics["loss"], metrics["grad_norm"]


@pytest.mark.usefixtures("hazards")
@example(case=(((4, 7),), sliced.Over(1, 2, 0, (sliced.Cut(1, (2, 5)),))), units=None)
@given(case=cut_leaves(), units=st.sampled_from([None, ("none",)]))
def test_sum_over_is_given_whole_leaves(case: Any, units: Any) -> None:
    leaves, over = case
    units = ("blocks.0.w0",) if units else None
    want = regularised(0, leaves, None, units)
    for got in run_ranks(functools.partial(regularised, leaves=leaves, over=over, units=units), over.ranks):
        assert_trees_close(got, want, rtol=1e-10)
