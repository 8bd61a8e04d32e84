"""Random programs of forwards, pullbacks, adds, updates and drops over one to three components, against plain ones."""

from __future__ import annotations

import functools
from typing import Any

import programs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_day, in_turns
from programs import Spec

import fzero as fz
from fzero.testing import run_ranks, strategies

pytestmark = pytest.mark.usefixtures("hazards")  # races show

NUMBER = st.integers(0, 5)
FORWARDS = st.lists(st.tuples(st.just("forward"), NUMBER, st.integers(-3, 5)), min_size=1, max_size=4)
PULLS = st.lists(st.tuples(st.just("pull"), NUMBER, NUMBER), min_size=1, max_size=4)
NAMES = [*["add", "update"] * 3, "joint", "drop", "forget", "eval", "back"]
ENDS = st.lists(st.sampled_from(NAMES).flatmap(lambda name: st.tuples(st.just(name), NUMBER)), min_size=1, max_size=4)
TURNS = st.lists(st.tuples(FORWARDS, PULLS, ENDS), min_size=1, max_size=4)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[Spec], list[Any]]:
    world = draw(st.integers(1, 4))
    stages = (0, 1, 2, 3) if world == 1 else (1, 2, 3)
    spec = st.builds(
        Spec,
        kind=st.sampled_from(["pure", "module"]),
        optimizer=st.sampled_from(["sgd", "clipped"]),
        frozen=st.sampled_from([False, False, False, True]),
        chosen=strategies.transforms(stages=stages).map(tuple),
    )
    return (
        world,
        draw(st.lists(spec, min_size=1, max_size=3)),
        [operation for turn in draw(TURNS) for part in turn for operation in part],
    )


@by_day(8)
@given(case=cases())
def test_programs(case: tuple[int, list[Spec], list[Any]]) -> None:
    world, specs, operations = case
    want = programs.run_plain(specs, operations, world)
    # one rank, and nothing that adds in another order: then to the bit
    exact = world == 1 and not any(spec.rounds_otherwise for spec in specs)

    def rank_main(rank: int) -> None:
        programs.compare(specs, programs.run_sharded(specs, operations, rank, world), want, rank, exact)

    run_ranks(rank_main, world)


# ---- a selection on real processes

ENCODER = Spec("module", "clipped", chosen=(("shard_zero1", fz.shard_zero1), ("donate", fz.donate)))
DECODER = Spec("pure", "clipped", chosen=(("shard_zero3", fz.shard_zero3),))
HEAD = Spec("pure", "sgd", chosen=(("remat", fz.remat), ("shard_zero2", fz.shard_zero2)))
CHAIN = [("forward", 0, -1), ("forward", 1, 0), ("forward", 2, 1), ("pull", 2, 0), ("pull", 1, 0), ("pull", 0, 0)]
SELECTION: dict[str, tuple[list[Spec], list[Any]]] = {
    "three in a chain, joint clip": ([ENCODER, DECODER, HEAD], [*CHAIN, ("joint", 0), *CHAIN, ("joint", 0)]),
    "siamese, retained, dropped": (
        [DECODER],
        [
            *[("forward", 0, -1)] * 3,
            *[("pull", 1, 1), ("add", 0), ("pull", 1, 0), ("add", 0), ("drop", 1), ("eval", 0)],
            *[("pull", 0, 0), ("update", 0), ("back", 0)],
            *[("forward", 0, -1), ("pull", 0, 0), ("update", 0)],
        ],
    ),
}


def on_processes(rank: int, name: str, world: int) -> None:
    specs, operations = SELECTION[name]
    got = programs.run_sharded(specs, operations, rank, world)
    programs.compare(specs, got, programs.run_plain(specs, operations, world), rank, False)


@in_turns(4)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", SELECTION)
def test_programs_on_processes(name: str, world: int) -> None:
    run_ranks(functools.partial(on_processes, name=name, world=world), world, backend="processes")
