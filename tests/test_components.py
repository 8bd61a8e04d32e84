"""Components in process groups of their own: the cotangent travels by a plain send, and the loop stays the same."""

from __future__ import annotations

from typing import Any

import pytest
import scenarios
import torch
import torch.distributed as dist
from programs import pure
from torch.distributed.device_mesh import DeviceMesh

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

pytestmark = pytest.mark.usefixtures("hazards")  # races show

F64 = torch.float64
ONE = torch.ones((), dtype=F64)


def groups(*ranks: list[int]) -> Any:
    """The mesh of the group that this rank is in; every rank makes all groups."""
    handles: list[Any] = [dist.new_group(members) for members in ranks]
    mine = next(i for i, members in enumerate(ranks) if dist.get_rank() in members)
    return DeviceMesh.from_group(handles[mine], "cpu", ranks[mine], mesh_dim_names=("dp",))


def groups_of_unequal_size(rank: int) -> None:
    """Vision on rank 0 alone, with the whole batch; text on ranks 1 and 2, whose losses are averaged."""
    mesh = groups([0], [1, 2])
    batches = scenarios.vector_batches(2)
    loss, text_params = scenarios.stack(1)
    rows = len(batches[0][0])
    if rank == 0:
        vision = fz.shard_zero3(fz.train_step(pure, fz.adamw(1e-2)), mesh=mesh)
        state = vision.init(scenarios.stack(2, blocks=2)[1])
        x = torch.cat([x for x, _ in batches])
    else:
        text = fz.shard_zero2(fz.train_step(loss, fz.adamw(1e-2)), mesh=mesh)
        state = text.init(text_params)
    whole = fz.train_step(lambda p, x, y: loss(p["text"], pure(p["vision"], x), y), fz.adamw(1e-2))
    expected = whole.init({"text": text_params, "vision": scenarios.stack(2, blocks=2)[1]})
    for _ in range(3):
        if rank == 0:
            out, pullback = vision.vjp(state, x)
            for peer, part in zip((1, 2), out.split(rows), strict=True):
                dist.send(part.contiguous(), peer)
            cotangent = torch.empty_like(out)
            for peer, part in zip((1, 2), cotangent.split(rows), strict=True):
                dist.recv(part, peer)
            grads, _ = pullback(cotangent / 2)  # the loss is the mean over the two text ranks
            state, _ = vision.update(state, grads)
        else:
            h = torch.empty_like(batches[0][0])
            dist.recv(h, 0)
            _, pullback = text.vjp(state, h, batches[rank - 1][1], argnums=0)
            grads, (cotangent, _) = pullback(ONE)
            dist.send(cotangent, 0)
            state, _ = text.update(state, grads)
        expected, _ = whole(expected, *[torch.cat(parts) for parts in zip(*batches, strict=True)])
    assert_trees_close(
        fz.gather(state.params), fz.gather(expected.params)["vision" if rank == 0 else "text"], rtol=1e-9
    )


def test_groups_of_unequal_size() -> None:
    run_ranks(groups_of_unequal_size, 3, backend="processes")
