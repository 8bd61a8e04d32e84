"""Derivatives of whole runs of functions whose sequences are cut over ranks: as in one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import whole_runs
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_day
from whole_runs import F64

import fzero as fz
from fzero.testing import run_ranks

MESHES = ((1, 2), (2, 2), (1, 3))
WIDTH, TOKENS = 4, 7
NAMES = ("q", "k", "v", "o")


def made() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(WIDTH, WIDTH, generator=generator, dtype=F64) for name in NAMES}


def batches(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, TOKENS, WIDTH, generator=generator, dtype=F64) for _ in "xy") for _ in range(count)]


def loss(attend: Any, mean: Any, p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    def heads(z: torch.Tensor) -> torch.Tensor:
        return z.unflatten(-1, (2, -1)).transpose(1, 2)

    q, k, v = [heads(x @ p[name]) for name in NAMES[:3]]
    out = attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ p["o"]
    return mean((out - y).square().mean(-1))


def on_rank(rank: int, sizes: Any, attention: str, over: str, others: Any, optimizer: str, how: str, name: str) -> Any:
    mesh = torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "sp"))
    ax = fz.parallel.axis(mesh, "sp")
    tokens = fz.parallel.axis(mesh, ("dp", "sp"))
    attend = fz.parallel.ring(ax) if attention == "ring" else fz.parallel.ulysses(None, ax)
    (x, y), low = batches(sizes[0])[rank // sizes[1]], rank % sizes[1]
    batch = tuple(z.tensor_split(sizes[1], 1)[low] for z in (x, y))
    axis = ("dp", "sp") if over == "data" else "dp"

    def transform(step: Any) -> Any:
        for each in others[:-1]:
            step = getattr(fz, each)(step)
        return getattr(fz, others[-1])(step, mesh=mesh, axis=axis)

    def own(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if over == "model":  # each rank has other tokens, and the step does not add what they say of the params
            p = {key: fz.parallel.copy(w, ax) for key, w in p.items()}
            return loss(attend, lambda x: fz.parallel.sum(x.sum(), ax) / (2 * TOKENS), p, x, y)
        return loss(attend, lambda x: fz.parallel.weighted_mean(x, torch.ones_like(x), tokens), p, x, y)

    run = whole_runs.by_steps(own, optimizer, 2, batch, batch, transform, how)
    return whole_runs.TRANSFORMS[name](run, (made(), *whole_runs.NUMBERS))


@pytest.mark.usefixtures("hazards")
@by_day(5)
@given(
    sizes=st.sampled_from(MESHES),
    attention=st.sampled_from(["ring", "ulysses"]),
    over=st.sampled_from(["data", "model"]),
    others=st.sampled_from([("shard_zero1",), ("shard_zero2",), ("shard_zero3",), ("remat", "shard_zero3")]),
    optimizer=st.sampled_from(["sgd", "adamw", "clipped"]),
    how=st.sampled_from(["step", "vjp", "scan"]),
    name=st.sampled_from(["grad", "grad_of_grad", "pushed_grad", "over_rates", "grads_over_rates"]),
)
def test_whole_runs_of_sequences(
    sizes: Any, attention: str, over: str, others: Any, optimizer: str, how: str, name: str
) -> None:
    plain = functools.partial(loss, fz.parallel.attention, torch.mean)
    data: Any = batches(sizes[0])
    want = whole_runs.TRANSFORMS[name](
        whole_runs.in_one_process(plain, optimizer, 2, data, data), (made(), *whole_runs.NUMBERS)
    )
    case = functools.partial(
        on_rank,
        sizes=sizes, attention=attention, over=over, others=others, optimizer=optimizer, how=how, name=name,
    )  # fmt: skip
    whole_runs.assert_found(run_ranks(case, sizes[0] * sizes[1]), want, name)
