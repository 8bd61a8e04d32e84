"""Collectives as linear maps: each is the other's transpose for the mean over ranks, and derivatives go through."""

from __future__ import annotations

from typing import Any

import torch

from fzero.comm.axis import Axis
from fzero.comm.linear import Wire, summed
from fzero.testing import run_ranks

F64 = torch.float64


def transposes(rank: int) -> tuple[float, float]:
    axis = Axis.of(None, "dp", None, "a test")
    wire = Wire("a buffer", axis, F64, F64, F64)
    generator = torch.Generator().manual_seed(rank)
    shard, full = torch.randn(3, generator=generator, dtype=F64), torch.randn(6, generator=generator, dtype=F64)
    pair: Any = torch.func.vjp(wire.spread, shard)
    spread, pull = pair
    assert torch.equal(pull(full)[0], wire.collect(full))
    assert torch.equal(torch.func.jvp(wire.spread, (shard,), (shard,))[1], spread)
    mapped = torch.func.vmap(wire.spread)(torch.stack([shard, 2 * shard]))
    assert torch.equal(mapped, torch.stack([spread, 2 * spread]))
    assert torch.equal(torch.func.grad(lambda x: summed(axis, x).sum())(shard), torch.ones(3, dtype=F64))
    # the mean of inner products over ranks
    return (spread @ full).item() / 2, (shard @ wire.collect(full)).item()


def test_gathering_and_reducing_are_transposes() -> None:
    left, right = zip(*run_ranks(transposes, 2), strict=True)
    torch.testing.assert_close(sum(left), sum(right))


def test_one_rank_communicates_nothing_and_gets_a_new_tensor() -> None:
    x = torch.ones(2)
    out = Wire("a buffer", Axis(), torch.float32, torch.float32, torch.float32).spread(x)
    assert torch.equal(out, x) and out.data_ptr() != x.data_ptr()
