"""Ranks that call different things: an error on every rank that names both sides, never a hang or other weights."""

from __future__ import annotations

import datetime
import functools
import re
import time
from collections.abc import Callable
from typing import Any

import optree
import pytest
import scenarios
import torch
import torch.distributed as dist
from nightly import by_turns
from torch.distributed.device_mesh import DeviceMesh

import fzero as fz
from fzero.comm import backend
from fzero.testing import RankError, assert_trees_close, checked_collectives, run_ranks

SHARDS: dict[int, Any] = {1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}
BATCH = scenarios.vector_batches(1)[0]
ONE = torch.ones((), dtype=torch.float64)
TIMEOUT = 3  # seconds, where it is waited for


def nothing(rank: int) -> None:
    pass


def on_processes(program: Callable[[int], Any], world: int, checked: bool) -> list[Any]:
    timeout = 30 if checked else TIMEOUT
    return run_ranks(program, world, backend="processes", timeout=timeout, checked=checked)


@pytest.fixture(scope="module", autouse=True)
def started_processes() -> None:
    """No timeout has to cover how long processes take to start."""
    run_ranks(nothing, 3, backend="processes")


def message_of(fn: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as caught:
        fn()
    return str(caught.value)


def component(seed: int = 0, stage: int = 3, mesh: Any = None, name: str = "loss") -> tuple[fz.Step, fz.TrainState]:
    loss, params = scenarios.stack(seed)
    loss.__name__ = name
    step = SHARDS[stage](fz.train_step(loss, fz.sgd(0.1)), mesh=mesh)
    return step, step.init(params)


# ---- one group


def call_different_units(rank: int) -> str:
    _, params = scenarios.stack()
    block = fz.unit(lambda p, x: x @ p["w"])
    step = fz.shard_zero3(fz.train_step(lambda p, x: block(p["blocks"][rank], x).mean(), fz.sgd(0.1)))
    state = step.init(params)
    return message_of(lambda: step(state, BATCH[0]))


def skips(rank: int, stage: int, how: str) -> Any:
    """Rank 1 has no image: it skips the tower, or does what the error says."""
    _, params = scenarios.stack()
    block = fz.unit(lambda p, x: x @ p["w"])

    def loss(p: Any, x: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        h = block(p["blocks"][0], x).square().mean()
        if len(image) or how == "empty":
            return h + block(p["blocks"][1], image).square().sum()
        if how == "skipped":
            return h
        return h + 0 * block(p["blocks"][1], torch.zeros_like(x)).square().sum()

    step = SHARDS[stage](fz.train_step(loss, fz.sgd(0.1)))
    state, image = step.init(params), BATCH[0] if rank == 0 else BATCH[0][:0]
    if how == "skipped":
        return message_of(lambda: step(state, BATCH[0], image))
    return fz.gather(step(state, BATCH[0], image)[0].params)


@pytest.mark.parametrize("checked", [True, False])
def test_a_rank_that_skips_a_unit_is_told_both_remedies(checked: bool) -> None:
    said = on_processes(functools.partial(skips, stage=3, how="skipped"), 2, checked)
    for text in said:
        assert "A rank that has nothing for a unit" in text, text
        assert "with empty inputs (x[:0]), or with a dummy, and adds its output times zero" in text, text


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("how", ["empty", "dummy"])
def test_each_remedy_gives_the_numbers_of_a_skipped_unit(stage: int, how: str) -> None:
    _, params = scenarios.stack()
    x = BATCH[0]

    def mean(p: Any) -> torch.Tensor:
        first, second = (x @ p["blocks"][n]["w"] for n in (0, 1))
        return first.square().mean() + second.square().sum() / 2  # over both ranks

    grads = torch.func.grad(mean)(params)
    want = optree.tree_map(lambda p, g: p - 0.1 * g, params, grads)
    for found in run_ranks(functools.partial(skips, stage=stage, how=how), 2):
        assert_trees_close(found, want, rtol=1e-10)


def lonely_pullback(rank: int, stage: int) -> str:
    """Rank 1 never calls its pullback, and is busy until rank 0 has given up, after the group's timeout."""
    step, state = component(stage=stage)
    _, pullback = step.vjp(state, *BATCH)
    if rank == 1:
        backend.store().wait(["given up"], datetime.timedelta(seconds=30))
        return ""
    started = time.monotonic()
    said = message_of(lambda: pullback(ONE))
    assert time.monotonic() - started < TIMEOUT + 4
    backend.store().set("given up", said)
    return said


def pullback_and_forward(rank: int) -> str:
    step, state = component()
    _, pullback = step.vjp(state, *BATCH)
    return message_of(lambda: pullback(ONE) if rank == 0 else step.forward(state, *BATCH))


def swapped_pullbacks(rank: int) -> str:
    """Two forwards of one state pulled back in another order: the same units, the same sizes, other cotangents."""
    step, state = component()
    pullbacks = [step.vjp(state, *BATCH)[1] for _ in range(2)]
    return message_of(lambda: pullbacks[rank](ONE))


def swapped_twins(rank: int) -> str:
    """Two components that differ in nothing but their values."""
    twins = [component(seed, name="twin") for seed in (0, 1)]
    return message_of(lambda: [step(state, *BATCH) for step, state in (twins if rank == 0 else twins[::-1])])


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize(
    ("program", "said"),
    [
        (call_different_units, ["all_gather of unit 'blocks.0'", "all_gather of unit 'blocks.1'"]),
        (pullback_and_forward, ["all_gather of unit '(root)'"]),
        (swapped_pullbacks, ["of 'loss'", "run 1", "run 2"]),
    ],
)
def test_on_every_rank_naming_both(program: Callable[[int], str], said: list[str], checked: bool) -> None:
    for message in on_processes(program, 2, checked):
        assert all(text in message for text in said), message
        assert "same order" in message if checked else "another rank has stopped, or has called other" in message


@pytest.mark.parametrize("checked", [True, False])
def test_swapped_twins_never_take_each_others_weights(checked: bool) -> None:
    """Only the identity that a component gets in `init` tells them apart."""
    for message in on_processes(swapped_twins, 2, checked):
        assert len(set(re.findall(r"of 'twin' \[\w+\]", message))) == 2, message


@pytest.mark.parametrize(("checked", "stage"), by_turns([True, False], [1, 3]))
def test_a_pullback_called_on_one_rank_only(stage: int, checked: bool) -> None:
    """Found at the first reduction where it is looked for, otherwise at the first wait of a full timeout."""
    unit = "blocks.2" if stage == 3 and not checked else "(root)"
    fn = functools.partial(lonely_pullback, stage=stage)
    message, _ = run_ranks(fn, 2, backend="processes", timeout=TIMEOUT, checked=checked)
    assert f"unit '{unit}'" in message


def test_on_threads() -> None:
    for message in run_ranks(call_different_units, 2):
        assert "rank 0: all_gather of unit 'blocks.0'" in message and "rank 1: all_gather of unit 'blocks.1'" in message

    def leaves(rank: int) -> None:
        step, state = component()
        if rank == 0:
            step(state, *BATCH)

    with pytest.raises(
        RankError, match=r"rank 0 is in all_gather of unit .* and waits for ranks \[1\]; rank 1 has fin"
    ):
        run_ranks(leaves, 2)


# ---- several groups


def meshes(*groups: list[int]) -> list[Any]:
    """One mesh per group; every rank must make all of them, and has None for those that it is not in."""
    mine, made = dist.get_rank(), []
    for group in groups:
        handle: Any = dist.new_group(group, timeout=datetime.timedelta(seconds=4))
        made.append(DeviceMesh.from_group(handle, "cpu", group, mesh_dim_names=("dp",)) if mine in group else None)
    return made


def same_ranks_in_another_order(rank: int) -> str:
    vision_mesh, text_mesh = meshes([0, 1], [0, 1])
    both = [component(0, mesh=vision_mesh, name="vision"), component(1, mesh=text_mesh, name="text")]
    return message_of(lambda: [step(state, *BATCH) for step, state in (both if rank == 0 else both[::-1])])


def circle(rank: int) -> str:
    """Three components on pairs of three ranks, and each rank starts with another one."""
    pairs = [[0, 1], [1, 2], [0, 2]]
    made = [
        component(i, mesh=mesh, name=name) if mesh else None
        for i, (mesh, name) in enumerate(zip(meshes(*pairs), ("a", "b", "c"), strict=True))
    ]
    order = {0: (0, 2), 1: (1, 0), 2: (2, 1)}[rank]
    mine = [pair for pair in (made[i] for i in order) if pair]
    return message_of(lambda: [step(state, *BATCH) for step, state in mine])


@pytest.mark.parametrize("checked", [True, False])
def test_overlapping_meshes_called_in_different_order(checked: bool) -> None:
    started = time.monotonic()
    for message in on_processes(same_ranks_in_another_order, 2, checked):
        assert "of 'vision'" in message and "of 'text'" in message, message
    for message in on_processes(circle, 3, checked):
        assert sum(f"of '{name}'" in message for name in "abc") >= 2, message
    if checked:
        assert time.monotonic() - started < 90


def test_a_circle_is_found_at_once_and_on_threads() -> None:
    def timed(rank: int) -> float:
        started = time.monotonic()
        assert "wait for one another" in circle(rank)
        return time.monotonic() - started

    assert max(run_ranks(timed, 3)) < 20


def overlapping_in_order(rank: int) -> None:
    """The same components in one order on every rank: no error, however long a rank takes."""
    pairs = [[0, 1], [1, 2], [0, 2]]
    made = [component(i, mesh=mesh) if mesh else None for i, mesh in enumerate(meshes(*pairs))]
    for turn in range(3):
        for i, pair in enumerate(made):
            if pair is not None:
                step, state = pair
                if (rank + i + turn) % 3 == 0:
                    time.sleep(0.12)  # longer than a look
                made[i] = step, step(state, *BATCH)[0]


def test_no_false_alarm() -> None:
    run_ranks(overlapping_in_order, 3)
    run_ranks(overlapping_in_order, 3, backend="processes")


def nested_and_switched_off(rank: int) -> None:
    step, state = component()
    with checked_collectives():
        state, _ = step(state, *BATCH)
        with checked_collectives(False):
            state, _ = step(state, *BATCH)
        state, _ = step(state, *BATCH)
    step(state, *BATCH)


def test_contexts_nest() -> None:
    run_ranks(nested_and_switched_off, 2)
    run_ranks(nested_and_switched_off, 2, backend="processes", checked=False)


# ---- memory


def too_little_memory(rank: int) -> tuple[str, str]:
    """A collective that needs more than there is on rank 0; a backend on CUDA raises torch's own error."""
    if rank == 1:
        return "", ""
    axis = fz.shard_zero3(fz.train_step(lambda p: p, fz.sgd(0.1))).axis()
    huge, own = torch.empty(1, dtype=torch.uint8), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def allocate(*_: Any) -> None:
        torch.empty(1 << 50, dtype=torch.uint8)

    def refuse(*_: Any) -> None:
        raise own

    assert axis.group is not None
    with checked_collectives(False):
        with pytest.raises(RuntimeError) as by_cpu:
            axis._announced("reduce_scatter", "blocks.0/0", huge, axis.group)(allocate)(huge)
        with pytest.raises(torch.OutOfMemoryError) as by_cuda:
            axis._announced("reduce_scatter", "blocks.0/0", huge, axis.group)(refuse)(huge)
    assert by_cuda.value is own and by_cuda.value.__cause__ is None
    return str(by_cpu.value), type(by_cpu.value).__name__


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_an_out_of_memory_error_stays_one(ranks: str) -> None:
    said, kind = run_ranks(too_little_memory, 2, backend=ranks)[0]
    assert "can't allocate memory" in said and kind == "RuntimeError"
    assert "another rank" not in said and "Communication failed" not in said


def one_fails_before_it_says_anything(rank: int) -> list[str]:
    """And once more: what is said of the second time is not taken for that of the first."""
    said = []
    for number in range(2):
        try:
            with checked_collectives():
                if rank == 0:
                    raise KeyError(f"the user's own, {number}")
                component()
        except (KeyError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    with checked_collectives():
        step, state = component()
        step(state, *BATCH)
    return said


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_rank_that_fails_before_its_first_collective(backend: str) -> None:
    _, other = run_ranks(one_fails_before_it_says_anything, 2, backend=backend, timeout=30)
    for number, said in enumerate(other):
        assert said.startswith("PeerStopped") and f"rank 0 has failed with KeyError: \"the user's own, {number}" in said
