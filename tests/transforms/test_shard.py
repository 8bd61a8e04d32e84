"""fz.shard_zero1, 2 and 3: what is cut, gathered and sent."""

from __future__ import annotations

import functools

import exactness
import pytest
import scenarios
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import in_turns

import fzero as fz

F64 = torch.float64


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_row_says_what_is_cut(stage: int) -> None:
    (row,) = exactness.SHARDS[stage](fz.train_step(lambda p, x: x, fz.sgd(0.1))).rows([("w", (2,), F64)])
    assert row.moments is not None and row.grads is not None
    cut = [bool(kept.cuts) for kept in (row.moments, row.grads, row.params)]
    assert cut == [True, stage >= 2, stage == 3]
    assert row.cuts[0].axis == "dp" and row.cuts[0].dim is None
    assert row.lifetime == ("one use" if stage == 3 else "the step") and row.held == (stage < 3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_without_a_process_group_it_says_what_to_start(stage: int) -> None:
    loss, params = scenarios.stack()
    what_to_start = r"there is no process group, and this step is sharded.*init_process_group.*fz\.testing\.run_ranks"
    with pytest.raises(RuntimeError, match=f"shard_zero{stage}: {what_to_start}"):
        exactness.SHARDS[stage](fz.train_step(loss, fz.sgd(0.1))).init(params)


AXES = ("replicas", "dp", "sp")
# the sizes of a mesh's axes, those that are cut over, those that are replicated over
MESHES = (
    ((1, 2, 2), ("dp", "sp"), None),
    ((1, 1, 3), ("dp", "sp"), None),
    ((1, 3, 1), ("dp", "sp"), "replicas"),
    ((2, 1, 2), ("dp", "sp"), "replicas"),
    ((2, 2, 1), ("replicas", "sp"), "dp"),
    ((2, 1, 2), "sp", ("replicas", "dp")),
    ((1, 2, 1), AXES, None),
)


def over(step: fz.Step, stage: int, mesh: object) -> fz.Step:
    sizes, axis, replicate = mesh  # type: ignore[misc]
    made = torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    return exactness.SHARDS[stage](step, mesh=made, axis=axis, replicate=replicate)


@pytest.mark.usefixtures("hazards")
@given(
    stage=st.sampled_from([1, 2, 3]),
    mesh=st.sampled_from(MESHES),
    scenario=st.sampled_from(sorted(exactness.SCENARIOS)),
    remat=st.booleans(),
)
def test_several_axes_are_one(stage: int, mesh: object, scenario: str, remat: bool) -> None:
    chosen = [("over", functools.partial(over, stage=stage, mesh=mesh)), *([("remat", fz.remat)] if remat else [])]
    exactness.check(scenario, chosen, torch.Size(mesh[0]).numel())  # type: ignore[index]


@in_turns(8, "on processes, as on threads")
@pytest.mark.parametrize("mesh", MESHES[:1] + MESHES[3:4])
def test_several_axes_on_real_processes(mesh: object) -> None:
    chosen = [("over", functools.partial(over, stage=3, mesh=mesh))]
    exactness.check("module", chosen, 4, backend="processes")


def test_axes_in_another_order_are_refused() -> None:
    def rank_main(rank: int) -> None:
        step = fz.train_step(lambda p, x: x, fz.sgd(0.1))
        mesh = torch.distributed.init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=AXES)
        with pytest.raises(ValueError, match=r"got axis=\('sp', 'dp'\), expected the axes in the mesh's order"):
            fz.shard_zero3(step, mesh=mesh, axis=("sp", "dp"))
        with pytest.raises(ValueError, match="every mesh axis once"):
            fz.shard_zero3(step, mesh=mesh, axis=("dp", "dp"))
        with pytest.raises(ValueError, match="of which 'sp' is the axis too"):
            fz.shard_zero3(step, mesh=mesh, axis=("dp", "sp"), replicate="sp")
        with pytest.raises(ValueError, match="without a mesh"):
            fz.shard_zero3(step, axis=("dp", "sp"))

    fz.testing.run_ranks(rank_main, 2)
