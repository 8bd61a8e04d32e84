"""Meshes of one name and size over other ranks: what an axis really is decides, not what it is called."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import scenarios
import torch
import torch.distributed as dist
from nightly import NIGHTLY, in_turns
from torch.distributed.device_mesh import DeviceMesh

import fzero as fz
from fzero.testing import assert_trees_close, recorded_collectives, run_ranks

SHARDS: dict[int, Any] = {1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}
ROWS, COLUMNS = ([0, 1], [2, 3]), ([0, 2], [1, 3])


def mesh_over(*ranks: list[int]) -> Any:
    """The mesh of the group that this rank is in; every rank makes all groups."""
    handles: list[Any] = [dist.new_group(members) for members in ranks]
    mine = next(i for i, members in enumerate(ranks) if dist.get_rank() in members)
    return DeviceMesh.from_group(handles[mine], "cpu", ranks[mine], mesh_dim_names=("dp",))


def trained(step: fz.Step, state: fz.TrainState, rank: int) -> Any:
    for _ in range(3):
        state, _ = step(state, *scenarios.vector_batches(4)[rank])
    return fz.gather(state.params)


def converted_to_columns(rank: int, stage: int) -> None:
    loss, params = scenarios.stack()
    plain = fz.train_step(loss, fz.chain(fz.clip_by_global_norm(0.5), fz.adamw(1e-2)))
    rows, columns = mesh_over(*ROWS), mesh_over(*COLUMNS)
    first, second = SHARDS[stage](plain, mesh=rows), SHARDS[stage](plain, mesh=columns)
    state = fz.convert(first.init(params), second)
    want = trained(second, second.init(params), rank)
    assert_trees_close(trained(second, state, rank), want, rtol=1e-10)
    # one batch of both ranks of a column
    whole = [torch.cat([scenarios.vector_batches(4)[r][i] for r in COLUMNS[rank % 2]]) for i in (0, 1)]
    alone = plain.init(params)
    for _ in range(3):
        alone, _ = plain(alone, *whole)
    assert_trees_close(want, fz.gather(alone.params), rtol=1e-10)
    again = fz.convert(state, first)
    assert_trees_close(trained(first, again, rank), trained(first, first.init(params), rank), rtol=1e-10)


@in_turns(4)
@pytest.mark.parametrize(
    ("stage", "backend"),
    [
        *[(stage, "threads") for stage in (1, 2, 3)],
        *[(stage, "processes") for stage in ((1, 2, 3) if NIGHTLY else (3,))],
    ],
)
def test_convert_to_a_mesh_of_the_same_names_and_sizes(stage: int, backend: str) -> None:
    run_ranks(functools.partial(converted_to_columns, stage=stage), 4, backend=backend)


@in_turns(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_convert_to_a_mesh_that_shards_what_another_replicates(stage: int) -> None:
    loss, params = scenarios.stack()
    plain = fz.train_step(loss, fz.adamw(1e-2))

    def rank_main(rank: int) -> Any:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        first = SHARDS[stage](plain, mesh=mesh, axis="a", replicate="b")
        second = SHARDS[stage](plain, mesh=mesh, axis="b", replicate="a")
        state, _ = first(first.init(params), *scenarios.vector_batches(4)[rank])
        return trained(second, fz.convert(state, second, lossy=True), rank)

    found = run_ranks(rank_main, 4)
    state = plain.init(params)
    whole = [torch.cat(parts) for parts in zip(*scenarios.vector_batches(4), strict=True)]
    for _ in range(4):
        state, _ = plain(state, *whole)
    for got in found:
        assert_trees_close(got, fz.gather(state.params), rtol=1e-10)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_state_of_another_mesh_is_refused_before_anything_is_communicated(stage: int) -> None:
    def rank_main(rank: int) -> None:
        loss, params = scenarios.stack()
        plain = fz.train_step(loss, fz.sgd(0.1))
        first = SHARDS[stage](plain, mesh=mesh_over(*ROWS))
        second = SHARDS[stage](plain, mesh=mesh_over(*COLUMNS))
        state, batch = first.init(params), scenarios.vector_batches(4)[rank]
        grads, _ = first.vjp(state, *batch)[1](torch.ones((), dtype=torch.float64))
        mine, theirs = (next(list(g) for g in groups if rank in g) for groups in (COLUMNS, ROWS))
        message = rf"leaf 'blocks\.0\.b'.*lies on ranks \{theirs}.* of axis 'dp'; expected.* ranks \{mine}.*fz\.convert"
        message = message.replace("]", r"\]")
        with recorded_collectives() as record:
            for call in (
                lambda: second(state, *batch),
                lambda: second.vjp(state, *batch),
                lambda: second.forward(state, *batch),
                lambda: second.update(state, grads),
                lambda: second.add_grads(state, grads),
                lambda: fz.hvp(second, state, grads, *batch),
                lambda: fz.per_example_grads(second, state, *batch),
            ):
                with pytest.raises(ValueError, match=message):
                    call()
        assert not record

    run_ranks(rank_main, 4)


def test_a_state_of_a_mesh_over_the_same_ranks_is_taken() -> None:
    """The default group, and a mesh over it."""

    def rank_main(rank: int) -> None:
        loss, params = scenarios.stack()
        plain = fz.train_step(loss, fz.sgd(0.1))
        by_default, by_mesh = fz.shard_zero3(plain), fz.shard_zero3(plain, mesh=mesh_over([0, 1]))
        state = by_default.init(params)
        assert_trees_close(trained(by_mesh, state, rank), trained(by_default, state, rank), rtol=1e-12)

    run_ranks(rank_main, 2)


def test_convert_refuses_states_of_several_components() -> None:
    """Each row has trained alone: a column has two models."""

    def rank_main(rank: int) -> None:
        loss, params = scenarios.stack()
        plain = fz.train_step(loss, fz.sgd(0.1))
        first = fz.shard_zero3(plain, mesh=mesh_over(*ROWS))
        second = fz.shard_zero3(plain, mesh=mesh_over(*COLUMNS))
        state, _ = first(first.init(params), *scenarios.vector_batches(4)[rank])
        with pytest.raises(ValueError, match=r"The params differ between the ranks of axis 'dp'.*several components"):
            fz.convert(state, second)

    run_ranks(rank_main, 4)
