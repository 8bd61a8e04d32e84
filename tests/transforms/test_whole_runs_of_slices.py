"""Derivatives of whole runs of functions of slices, by whole leaves and an optimizer's numbers: as in one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import test_shard_tensor as functions
import whole_runs
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_day

import fzero as fz
from fzero.testing import run_ranks, strategies

MESHES = ((1, 2), (2, 2), (1, 3))
KINDS = (("mlp", 4), ("fused", 3)), (("gathered", 5), ("split", 1)), (("whole", 2), ("mlp", 3))


def on_rank(
    rank: int, layers: Any, sizes: tuple[int, int], stage: int, others: Any, optimizer: str, how: str, name: str
) -> Any:
    loss, params = functions.model(layers)
    mesh = functions.meshed(sizes)
    ax = fz.parallel.axis(mesh, "tp")
    chosen = functions.chosen_of(stage, others, functions.plan_of(layers), mesh)
    batch = functions.batches(sizes[0])[rank // sizes[1]]
    run = whole_runs.by_steps(
        lambda p, x: loss(p, x, ax), optimizer, 2, batch, batch, functools.partial(strategies.apply, chosen=chosen), how
    )
    return whole_runs.TRANSFORMS[name](run, (params, *whole_runs.NUMBERS))


@pytest.mark.usefixtures("hazards")
@by_day(6)
@given(
    layers=st.sampled_from(KINDS),
    sizes=st.sampled_from(MESHES),
    stage=st.integers(0, 3),
    others=st.sampled_from([("shard", "tensor"), ("tensor", "remat", "shard"), ("accumulate", "tensor", "shard")]),
    optimizer=st.sampled_from(["sgd", "adamw", "clipped", "lamb", "block clipped"]),
    how=st.sampled_from(["step", "vjp", "scan"]),
    name=st.sampled_from(["grad", "grad_of_grad", "pushed_grad", "over_rates", "grads_over_rates"]),
)
def test_whole_runs_of_slices(
    layers: Any, sizes: tuple[int, int], stage: int, others: Any, optimizer: str, how: str, name: str
) -> None:
    loss, params = functions.model(layers)
    sizes = sizes if stage else (1, sizes[1])
    data: Any = functions.batches(sizes[0])
    plain = whole_runs.in_one_process(loss, optimizer, 2, data, data)
    want = whole_runs.TRANSFORMS[name](plain, (params, *whole_runs.NUMBERS))
    case = functools.partial(
        on_rank,
        layers=layers, sizes=sizes, stage=stage, others=others, optimizer=optimizer, how=how, name=name,
    )  # fmt: skip
    whole_runs.assert_found(run_ranks(case, sizes[0] * sizes[1]), want, name)
