"""What fz.plan says of a step of fz.jit is what its graph sends, to the byte and in order."""

from __future__ import annotations

import time
from typing import Any

import pytest
import scenarios

import fzero as fz
from fzero.comm.divergence import recorded_collectives

NAMES = {"all_gather": "gather", "reduce_scatter": "reduce"}


def sent(step: fz.Step, params: Any, ranks: int) -> list[tuple[str, object, int]]:
    """What one of many ranks sends in a call of the graph, to all others."""
    state, batch = step.init(params), scenarios.token_batches(1)[0]
    begin = time.perf_counter()
    step.lower(state, *batch)
    assert step.traces == 1 and time.perf_counter() - begin < 30
    state, _ = step(state, *batch)  # without a graph
    with recorded_collectives() as records:
        step(state, *batch)
    assert step.traces == 1
    shares = {"gather": 1, "reduce": ranks}  # of which each other rank is sent one
    own = [(NAMES[what], tag, size) for what, tag, size in records if what in NAMES and type(tag) is not str]
    return [(what, tag, (ranks - 1) * size // shares[what]) for what, tag, size in own]


@pytest.mark.parametrize(("shard", "ranks"), [(fz.shard_zero3, 1024), (fz.shard_zero2, 8)])
@pytest.mark.filterwarnings("ignore:step. the function does not use")
def test_the_messages_of_many_ranks(shard: Any, ranks: int) -> None:
    loss, params = scenarios.tiny_lm()
    with fz.testing.fake_mesh({"dp": ranks}) as mesh:
        step = fz.freeze(shard(fz.train_step(loss, fz.adamw(1e-2)), mesh=mesh), "blocks.*.up.*")  # units of two groups
        step = fz.jit(step, backend="graph")
        plan = fz.plan(step, params, world_size=ranks)
        got = sent(step, params, ranks)
    assert got == [(m.what, m.key, m.nbytes) for turn in plan.schedule for m in (*turn.before, *turn.meanwhile)]
    for what, purpose in (("reduce", "grads"), *([("gather", "params")] if shard is fz.shard_zero3 else [])):
        own = [nbytes for kind, _, nbytes in got if kind == what]
        planned = [(each.messages, each.nbytes) for each in plan.messages if each.purpose == purpose]
        assert planned == [(len(own), sum(own))]


def test_the_schedule_is_printed() -> None:
    loss, params = scenarios.tiny_lm()
    step = fz.shard_zero3(fz.train_step(loss, fz.adamw(1e-2)))
    assert not fz.plan(step, params, world_size=4).schedule
    said = str(fz.plan(fz.jit(step, backend="graph"), params, world_size=4)).splitlines()
    begin = said.index("graph of one microbatch:")
    lines = [line.strip() for line in said[begin + 1 :]]
    assert len(lines) == 9
    assert lines[1].startswith("blocks.0, meanwhile gather blocks.1") and "reduce blocks.2" in lines[5]
    assert lines[5].startswith("blocks.1 pulled back, meanwhile") and lines[-1].startswith("(update) behind reduce")
