"""Steps within functions that torch.func transforms, by what does not come to them: as steps outside of those."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import pytest
import scenarios
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import in_turns

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks, strategies

pytestmark = pytest.mark.usefixtures("hazards")  # races show

Scalar = Callable[[torch.Tensor], torch.Tensor]
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: fz.sgd(0.1),
    "clipped adamw": lambda: fz.chain(fz.clip_by_global_norm(0.5), fz.adamw(0.1)),
    "muon": lambda: fz.partition({"*.w": fz.muon(0.1), "*": fz.sgd(0.1)}),
    "torch's": lambda: fz.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9),
    "whole": lambda: fz.whole(fz.GradientTransformation(lambda params: None, by_columns)),
}
AROUND: dict[str, Callable[[Scalar], Scalar]] = {
    "grad": lambda fn: lambda w: torch.func.grad(fn)(w).square().sum(),
    "jvp": lambda fn: lambda w: torch.func.jvp(fn, (w,), (torch.ones_like(w),))[1],
    "vmap": lambda fn: lambda w: torch.vmap(fn)(torch.stack([w, 2 * w])).sum(),
}


def by_columns(grads: Any, _: None, __: Any) -> Any:
    return optree.tree_map(lambda g: -0.1 * g / (1 + g.abs().sum(0)), grads), None


def check(rank: int, optimizer: str, chosen: Any, around: list[str], world: int) -> None:
    loss, params = scenarios.stack()
    x, y = scenarios.vector_batches(world)[rank]
    chosen = [(name, transform) for name, transform in chosen if name != "donate"]  # which torch.func refuses
    step = strategies.apply(fz.train_step(loss, OPTIMIZERS[optimizer]()), chosen)

    def updated(state: Any) -> Any:
        for size in (1, 2):
            state, _ = step(state, size * x, y)
        return state

    want = fz.gather(updated(step.init(params)).params)
    found: list[Any] = []

    def outer(w: torch.Tensor) -> torch.Tensor:
        state = updated(step.init(params))
        found.append(fz.gather(state.params))
        return step.forward(state, x * w, y)  # type: ignore[no-any-return]

    def plain(w: torch.Tensor) -> torch.Tensor:
        return loss(want, x * w, y)  # type: ignore[no-any-return]

    for name in around:
        outer, plain = AROUND[name](outer), AROUND[name](plain)  # type: ignore[assignment]
    weights = torch.linspace(0.5, 1.5, 5, dtype=torch.float64)
    torch.testing.assert_close(outer(weights), plain(weights), rtol=1e-10, atol=1e-12)
    for each in found:
        assert_trees_close(each, want, rtol=1e-10)  # sums over microbatches are in another order


TRANSFORMS = strategies.transforms(stages=(0, 1, 2, 3), patterns=scenarios.BLOCKS, memories=("host",))
LEVELS = st.lists(st.sampled_from(sorted(AROUND)), min_size=1, max_size=2)


@given(
    optimizer=st.sampled_from(sorted(OPTIMIZERS)), chosen=TRANSFORMS, around=LEVELS, world=st.integers(1, 3)
)
def test_drawn_steps_within_transforms(optimizer: str, chosen: Any, around: list[str], world: int) -> None:
    run_ranks(functools.partial(check, optimizer=optimizer, chosen=chosen, around=around, world=world), world)


@in_turns(5)
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_on_processes(optimizer: str, stage: int) -> None:
    chosen = [("shard", {1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}[stage])]
    run = functools.partial(check, optimizer=optimizer, chosen=chosen, around=["grad"], world=2)
    run_ranks(run, 2, backend="processes")
