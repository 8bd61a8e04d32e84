"""Functions as people write them: programs drawn inside `fn` and around it are equal to plain torch, or refused.

`python -m drawn --seed N` (in tests/) shows and runs one program of those that are drawn from seeds; `make soak` runs
many.
"""

from __future__ import annotations

import pickle

import drawn
import pytest
from drawn.counting import Report, Tally
from drawn.language import FEATURES, Program, Statement
from drawn.running import run, run_on_processes, run_plain
from drawn.verdicts import Verdict, difference
from drawn.write import written
from hypothesis import given, settings

SHARE = 5.0  # percent of the programs that have a feature, at least


def check(program: Program, verdict: Verdict) -> None:
    assert not verdict.bad, f"{verdict.kind}: {verdict.detail}\n{drawn.listing(program)}\n{program!r}"


@settings(max_examples=max(150, settings().max_examples))
@given(program=drawn.programs())
def test_drawn_programs_are_equal_to_plain_torch_or_refused(program: Program) -> None:
    check(program, run(program))


@pytest.mark.parametrize("world", [2, 3])
def test_drawn_programs_on_processes(world: int) -> None:
    """One job with many programs, as starting costs seconds."""
    programs = [drawn.from_seed(seed).replace(world=world) for seed in range(1000, 1030)]
    programs = [program if program.stage else program.replace(stage=3) for program in programs]
    for program, verdict in zip(programs, run_on_processes(programs, world), strict=True):
        check(program, verdict)


def test_every_feature_is_in_many_programs() -> None:
    """Of those that plain torch accepts, too: `make soak` counts them."""
    tally = Tally()
    for seed in range(1500):
        program = drawn.from_seed(seed)
        assert pickle.loads(pickle.dumps(program)) == program
        compile(written(program)[0], f"program {seed}", "exec")
        tally.add(Report(program, Verdict("equal")))
    assert not tally.rare(SHARE)
    assert set(tally.features) == set(FEATURES)


@pytest.mark.parametrize("name", [name for name, feature in FEATURES.items() if feature.remedy])
def test_what_a_refusal_tells_computes_the_same(name: str) -> None:
    """In plain torch: the program as it was drawn, and as it is written instead."""
    feature, compared = FEATURES[name], 0
    for number in range(6):
        for kind in feature.kinds:
            statement = Statement(name, (number, number // 2, number // 3, 0))
            program = Program(kind=kind, form=feature.forms[0], statements=(statement,))
            told = program.replace(statements=(statement._replace(remedied=True),))
            one, other = run_plain(program), run_plain(told)
            assert not other.refused
            if not one.refused:
                assert difference(other.of_rank(0), one.of_rank(0)) is None, drawn.listing(program)
                compared += 1
    assert compared
