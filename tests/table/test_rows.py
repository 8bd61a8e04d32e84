"""A rule holds for its pattern, in every column: what is said of some leaves is done with those and no others."""

from __future__ import annotations

from typing import Any

import pytest
import scenarios
import torch
from nightly import in_turns
from torch.utils._python_dispatch import TorchDispatchMode

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, recorded_collectives, run_ranks

SOME = "blocks.1.*"
OTHERS = "blocks.0.*|blocks.2.*"
AS_ON_THREADS = pytest.param("processes", marks=in_turns(8, "on processes, as on threads"))
def plain() -> tuple[fz.Step, Any]:
    loss, params = scenarios.stack()
    return fz.train_step(loss, fz.adamw(1e-2)), params


class Counting(TorchDispatchMode):
    """Counts an operator, also where a unit runs again."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.tanh.default
        return func(*args, **(kwargs or {}))


def test_only_the_units_of_the_pattern_are_recomputed() -> None:
    step, params = plain()
    batch = scenarios.vector_batches(1)[0]
    state = step.init(params)  # which all share
    found = []
    for other in (step, fz.remat(step, SOME), fz.remat(step, OTHERS), fz.remat(step)):
        with Counting() as counting:
            new, _ = other(state, *batch)
        found.append((counting.count, fz.gather(new.params)))
        assert_trees_equal(found[0][1], found[-1][1])
    assert [count for count, _ in found] == [3, 4, 5, 6]
    rows = fz.remat(step, SOME).table(state.layout).rows
    assert [row.path for row in rows if row.remat] == ["blocks.1.b", "blocks.1.w"]


@pytest.mark.parametrize("backend", ["threads", AS_ON_THREADS])
@pytest.mark.parametrize("world", [2, 3])
def test_leaves_that_are_not_sharded_are_whole_and_averaged(world: int, backend: str) -> None:
    got = run_ranks(_sharded_in_part, world, backend=backend)
    step, params = plain()
    state = step.init(params)
    x, y = (torch.cat(parts) for parts in zip(*scenarios.vector_batches(world), strict=True))
    for _ in range(3):
        state, metrics = step(state, x, y)
    for params, norm in got:
        assert_trees_close(params, fz.gather(state.params), rtol=1e-11)
        assert norm == pytest.approx(float(metrics["grad_norm"]), rel=1e-11)


def _sharded_in_part(rank: int) -> tuple[Any, float]:
    world = torch.distributed.get_world_size()
    batch = scenarios.vector_batches(world)[rank]
    step, params = plain()
    step = fz.accumulate(fz.shard_zero2(fz.shard_zero3(step, pattern="blocks.0.*"), pattern=SOME), 2)
    state = step.init(params)
    shards = {key.unit: group.shards for key, group in state.layout.groups.items()}
    assert shards == {"blocks.0": world, "blocks.1": world, "blocks.2": 1, "": 1}
    assert {key.unit for key in state.params.held} == {"blocks.1"}
    assert state.params["blocks.2.w"].numel() == 25
    for _ in range(2):
        state, metrics = step(state, *batch)
    with recorded_collectives() as record:
        state, metrics = step(state, *batch)
    gathers = [tag for operation, tag, _ in record if operation == "all_gather"]
    assert gathers.count(("blocks.0", 0)) == 2  # once a microbatch: as the last unit that is gathered it stays
    assert ("blocks.2", 0) not in gathers and ("", 0) not in gathers
    return fz.gather(state.params), float(metrics["grad_norm"])


def test_a_state_that_is_sharded_in_part_is_converted() -> None:
    def rank_main(rank: int) -> None:
        step, params = plain()
        batch = scenarios.vector_batches(2)[rank]
        some, all_of_it = fz.shard_zero3(step, pattern=SOME), fz.shard_zero2(step)
        state, _ = some(some.init(params), *batch)
        there = fz.convert(state, all_of_it)
        back = fz.convert(there, some)
        assert_trees_equal(fz.gather(there.params), fz.gather(state.params))
        assert_trees_equal(back, state)
        assert_trees_close(fz.gather(all_of_it(there, *batch)[0].params), fz.gather(some(state, *batch)[0].params))

    run_ranks(rank_main, 2)


def test_the_plan_counts_what_is_sharded_in_part() -> None:
    step, params = plain()
    whole = fz.plan(step, params)
    all_of_it = fz.plan(fz.shard_zero3(step), params, world_size=2)
    some = fz.plan(fz.shard_zero3(step, pattern=OTHERS), params, world_size=2)
    assert all_of_it.params < some.params < whole.params
    assert [row.lifetime for row in some.rows].count("one use") == 4
    assert some.gathered == all_of_it.gathered and some.root == 0


def test_patterns_that_overlap_and_agree_are_one() -> None:
    step, params = plain()
    assert fz.remat(fz.remat(step), SOME).init(params).layout.rows[2].remat


def test_patterns_that_contradict_each_other_are_refused_by_leaf() -> None:
    step, params = plain()
    both = fz.shard_zero1(fz.shard_zero3(step), pattern=SOME)
    match = r"'axis' of leaf 'blocks\.1\.b' is set twice: by shard_zero3\(axis='dp'\) and by shard_zero1\(.*blocks\.1"
    with pytest.raises(ValueError, match=match):
        fz.plan(both, params, world_size=2)


@pytest.mark.parametrize(
    ("transform", "column"),
    [(fz.remat, "remat"), (fz.compile, "compile"), (lambda s, p: fz.autocast(s, pattern=p), "compute")],
)
def test_units_run_whole(transform: Any, column: str) -> None:
    step, params = plain()
    match = rf"the column '{column}' holds for one of the leaves 'blocks\.1\.b' and 'blocks\.1\.w' only, and unit"
    with pytest.raises(ValueError, match=match):
        transform(step, "blocks.1.w").init(params)
    state = step.init(params)
    with pytest.raises(ValueError, match=match):  # a state that the step has not made
        transform(step, "blocks.1.w").forward(state, *scenarios.vector_batches(1)[0]) if column != "compute" else (
            transform(step, "blocks.1.w").init(params)
        )


def test_an_unknown_column_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mine: got a rule for the column 'color', expected one of 'axis', 'compute'"):
        plain()[0].with_rule("color", "red", "mine")
    with pytest.raises(TypeError, match=r"mine: got 'bfloat16' for the column 'compute', expected a dtype"):
        plain()[0].with_rule("compute", "bfloat16", "mine")


def test_one_mesh_for_all_leaves() -> None:
    step, _ = plain()
    with pytest.raises(ValueError, match=r"shard_zero1: this step is sharded over axis 'dp' already"):
        fz.shard_zero1(fz.shard_zero3(step, pattern=SOME), axis="other", pattern=OTHERS)


def test_per_example_grads_of_units_with_an_autocast_of_their_own_are_refused() -> None:
    loss, params = scenarios.stack(dtype=torch.float32)
    step = fz.autocast(fz.train_step(loss, fz.sgd(0.1)), pattern=SOME)
    with pytest.raises(ValueError, match=r"unit 'blocks\.1' runs under another autocast"):
        fz.per_example_grads(step, step.init(params), *scenarios.vector_batches(1, dtype=torch.float32)[0])


@pytest.mark.parametrize("name", ["a#b", "a/0", "(root)", "unit x", "unit 'x'", "a, buffer 1"])
def test_units_may_be_called_anything(name: str) -> None:
    """Groups are known by values: nothing is told from a name's characters."""
    params = {name: {"w": torch.ones(3), "v": torch.ones(2, dtype=torch.float64)}, "w": torch.ones(3)}
    unit = fz.unit(lambda p, x: (p["w"] * x).sum() + p["v"].sum())
    step = fz.train_step(lambda p, x: unit(p[name], x) + p["w"].sum(), fz.adamw(0.1), units=(name,))

    def rank_main(rank: int) -> Any:
        sharded = fz.fuse_update(fz.shard_zero3(step))
        return fz.gather(sharded(sharded.init(params), torch.ones(3))[0].params)

    state = step.init(params)
    held = fz.gather(state.params)
    new, _ = fz.fuse_update(step)(state, torch.ones(3))
    assert_trees_equal(fz.gather(state.params), held)
    for got in run_ranks(rank_main, 2):
        assert_trees_close(got, fz.gather(new.params), rtol=1e-6)
