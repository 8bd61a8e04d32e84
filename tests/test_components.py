"""Components in process groups of their own: the cotangent travels by a plain send, and the loop stays the same."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import scenarios
import torch
import torch.distributed as dist
from nightly import in_turns
from programs import pure
from torch.distributed.device_mesh import DeviceMesh

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

pytestmark = pytest.mark.usefixtures("hazards")  # races show

F64 = torch.float64
ONE = torch.ones((), dtype=F64)
OPTIMIZER = fz.chain(fz.clip_by_global_norm(0.2), fz.adamw(1e-2))
SHARDS: dict[int, Any] = {1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}


def trained_as_one(world: int, steps: int) -> Any:
    loss, text = scenarios.stack(1)
    _, vision = scenarios.stack(2, blocks=2)
    whole = fz.train_step(lambda p, x, y: loss(p["text"], pure(p["vision"], x), y), OPTIMIZER)
    state = whole.init({"text": text, "vision": vision})
    batch = [torch.cat(parts) for parts in zip(*scenarios.vector_batches(world), strict=True)]
    for _ in range(steps):
        state, _ = whole(state, *batch)
    return fz.gather(state.params)


def groups(*ranks: list[int]) -> Any:
    """The mesh of the group that this rank is in; every rank makes all groups."""
    handles: list[Any] = [dist.new_group(members) for members in ranks]
    mine = next(i for i, members in enumerate(ranks) if dist.get_rank() in members)
    return DeviceMesh.from_group(handles[mine], "cpu", ranks[mine], mesh_dim_names=("dp",))


def exchanged(value: torch.Tensor, peer: int) -> torch.Tensor:
    other = torch.empty_like(value)
    works = [dist.isend(value, peer), dist.irecv(other, peer)]
    for work in works:
        assert work is not None
        work.wait()
    return other


def pairs_of_ranks(rank: int, vision_stage: int, text_stage: int) -> None:
    """Vision on ranks 0 and 1, text on ranks 2 and 3; vision rank i feeds text rank i + 2."""
    mesh = groups([0, 1], [2, 3])
    x, y = scenarios.vector_batches(2)[rank % 2]
    loss, text_params = scenarios.stack(1)
    want = trained_as_one(2, 3)
    if rank < 2:
        vision = SHARDS[vision_stage](fz.train_step(pure, OPTIMIZER), mesh=mesh)
        state = vision.init(scenarios.stack(2, blocks=2)[1])
        for _ in range(3):
            out, pullback = vision.vjp(state, x)
            dist.send(out, rank + 2)
            cotangent = torch.empty_like(out)
            dist.recv(cotangent, rank + 2)
            grads, _ = pullback(cotangent)
            own = fz.global_norm(grads)
            joint = torch.hypot(own, exchanged(own, rank + 2))
            state, _ = vision.update(state, grads, grad_norm=joint)
        assert_trees_close(fz.gather(state.params), want["vision"], rtol=1e-9)
    else:
        text = SHARDS[text_stage](fz.train_step(loss, OPTIMIZER), mesh=mesh)
        state = text.init(text_params)
        for _ in range(3):
            h = torch.empty_like(x)
            dist.recv(h, rank - 2)
            _, pullback = text.vjp(state, h, y, argnums=0)
            grads, (cotangent, _) = pullback(ONE)
            dist.send(cotangent, rank - 2)
            own = fz.global_norm(grads)
            joint = torch.hypot(own, exchanged(own, rank - 2))
            state, _ = text.update(state, grads, grad_norm=joint)
        assert_trees_close(fz.gather(state.params), want["text"], rtol=1e-9)


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


@in_turns(2)
@pytest.mark.parametrize(("vision", "text"), [(1, 3), (3, 2)])
def test_each_component_in_its_own_process_group(vision: int, text: int) -> None:
    run_ranks(functools.partial(pairs_of_ranks, vision_stage=vision, text_stage=text), 4, backend="processes")


def test_groups_of_unequal_size() -> None:
    run_ranks(groups_of_unequal_size, 3, backend="processes")
