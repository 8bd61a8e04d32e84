"""Functions as people write them: programs drawn inside `fn` and around it are equal to plain torch, or refused.

`python -m drawn --seed N` (in tests/) shows and runs one program of those that are drawn from seeds; `make soak` runs
many.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator

import drawn
import pytest
from drawn.counting import Report, Tally
from drawn.drawing import TOLD
from drawn.language import FEATURES, Action, Program, Statement
from drawn.remedies import remedy
from drawn.running import run, run_on_processes, run_plain
from drawn.verdicts import Verdict, difference
from drawn.write import must_be_refused, written
from hypothesis import given
from nightly import NIGHTLY, by_day, in_turns

pytestmark = pytest.mark.usefixtures("hazards")  # races show

# unit and line; what is changed among the arguments shows in no line
SAID = r"<drawn program \d+>:\d+|among its arguments|made again of its parts|that it computed or was given"
NAMED = rf"[Uu]nit 'blocks\.\d+' .*({SAID})"
SHARE = 5.0  # percent of the programs that have a feature, at least


def check(program: Program, verdict: Verdict) -> None:
    """A program is refused where one of its units is not pure, and otherwise equal, or refused for another reason."""
    said = f"{verdict.kind}: {verdict.detail}\n{drawn.listing(program)}\n{program!r}"
    assert not verdict.bad, said
    assert verdict.kind != "equal" or not must_be_refused(program), said


@pytest.mark.timeout(900)  # a failing one is made smaller, which takes minutes
@by_day(8)
@given(program=drawn.programs())
def test_drawn_programs_are_equal_to_plain_torch_or_refused(program: Program) -> None:
    check(program, run(program))


@in_turns(8, "on processes, as on threads")
@pytest.mark.parametrize("world", [2, 3])
def test_drawn_programs_on_processes(world: int) -> None:
    """One job with many programs, as starting costs seconds; `make soak` runs many more. Threads see the same."""
    count = 10 if NIGHTLY else 6
    programs = [drawn.from_seed(seed).replace(world=world) for seed in range(1000 * world, 1000 * world + count)]
    programs = [program if program.stage else program.replace(stage=3) for program in programs]
    for program, verdict in zip(programs, run_on_processes(programs, world), strict=True):
        check(program, verdict)
        assert verdict.kind == run(program).kind


def test_every_feature_is_in_many_programs() -> None:
    """Of those that plain torch accepts, too: `make soak` counts them."""
    tally = Tally()
    for seed in range(1500):
        program = drawn.from_seed(seed)
        if seed < 500:  # to compile them is what takes time
            assert pickle.loads(pickle.dumps(program)) == program
            compile(written(program)[0], f"program {seed}", "exec")
        tally.add(Report(program, Verdict("equal")))
    assert not tally.rare(SHARE)
    assert set(tally.features) == set(FEATURES)
    assert set(tally.told) == set(TOLD) and all(FEATURES[name].remedy for name in TOLD)
    assert all(tally.told[name] < sum(tally.features[name].values()) for name in TOLD)  # some are drawn as refused


# ---- one feature at a time


def variants(name: str) -> Iterator[Program]:
    """Programs that consist of one feature, by day of some forms and kinds of models, on one rank or on two, in turns.

    Nightly, of all; `make soak` draws any.
    """
    feature = FEATURES[name]
    verbs = {"scalar": ("step", "forward"), "aux": ("step", "forward"), "outputs": ("vjp", "forward")}
    for number in range(4) if NIGHTLY else (1 + len(name) // 2 % 3,):
        for place, kind in enumerate(feature.kinds):
            if not NIGHTLY and len(feature.kinds) > 1 and (number in (0, 3)) == bool((place + len(name)) % 2):
                continue
            form = feature.forms[number % len(feature.forms)]
            yield Program(
                seed=number,
                kind=kind,
                statements=(Statement(name, (number, number // 2, number // 3, 0)),),
                form=form,
                world=1 + number % 2,
                transforms=("remat",) if (number // 2 + len(kind)) % 2 else (),
                actions=tuple(Action(verb) for verb in (*verbs[form], *verbs[form][:1])),
            )


@in_turns(7)
@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_is_equal_or_what_its_refusal_tells_works(name: str) -> None:
    counted = 0
    for program in variants(name):
        verdict = run(program)
        check(program, verdict)
        counted += verdict.kind != "uncounted"
        if verdict.kind == "refused":
            assert not must_be_refused(program) or re.search(NAMED, verdict.detail), verdict.detail
            assert remedy(program, verdict, run), f"{verdict.detail}\n{drawn.listing(program)}"
    assert counted


@in_turns(3)
@pytest.mark.parametrize("name", [name for name, feature in FEATURES.items() if feature.remedy])
def test_what_a_refusal_tells_computes_the_same(name: str) -> None:
    """In plain torch: the program as it was drawn, and as it is written instead."""
    compared = 0
    for program in variants(name):
        kept = run_plain(program).program.actions  # some that torch.func refuses are left out
        program = program.replace(actions=tuple(action for action in kept if action.verb != "none"))
        statement = program.statements[0]._replace(remedied=True)
        one, other = run_plain(program), run_plain(program.replace(statements=(statement,)))
        assert not other.refused
        if not one.refused:
            assert difference(other.of_rank(0), one.of_rank(0)) is None, drawn.listing(program)
            compared += 1
    assert compared


# programs that were not equal once, for what no smaller test shows
SEEN = [
    Program(
        seed=200297,
        plain=1,
        statements=(Statement("autograd.grad with create_graph"),),
        transforms=("remat of some", "activations= host of some"),
    ),
]


@pytest.mark.parametrize("program", SEEN, ids=[str(program.seed) for program in SEEN])
def test_programs_that_were_seen(program: Program) -> None:
    verdict = run(program)
    assert verdict.kind == "equal", verdict.detail
