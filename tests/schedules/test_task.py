"""Tasks and schedules as values: how they are written, and what they refuse."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fzero.schedules import Kind, Schedule, Task, check, gpipe, one_f_one_b


def tasks(*places: str) -> list[list[Task]]:
    return [[Task.parse(text) for text in place.split()] for place in places]


@given(st.sampled_from(Kind), st.integers(0, 40), st.integers(0, 400), st.integers(0, 40))
def test_a_task_is_read_as_it_is_written(kind: Kind, stage: int, microbatch: int, peer: int) -> None:
    task = Task(kind, stage, microbatch, peer if kind in (Kind.SEND, Kind.RECEIVE) else None)
    assert Task.parse(repr(task)) == task and len({task, Task.parse(str(task))}) == 1
    if task.is_message:
        assert task.other_end.other_end == task and task.other_end.kind is not kind
    assert pickle.loads(pickle.dumps(task)) == task


@pytest.mark.parametrize("text", ["", "F0", "F0.1>2", "S0.1", "S0.1<2", "R0.1>2", "X0.1", "F-1.0", "F0.1 ", "f0.1"])
def test_what_is_no_task_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Task.parse: got {text!r}, expected a letter of F, B, I, W")):
        Task.parse(text)


def test_messages_stand_beside_what_they_belong_to() -> None:
    schedule = Schedule("mine", 3, 1, tasks("F0.0 F2.0 I2.0 W2.0 B0.0", "F1.0 B1.0"))
    full = schedule.with_messages([(0, 2)])  # 0 and 2 are at one place
    assert full.places == tuple(
        map(
            tuple,
            tasks("F0.0 S0.0>1 R2.0<1 F2.0 I2.0 S2.0>1 W2.0 R0.0<1 B0.0", "R1.0<0 F1.0 S1.0>2 R1.0<2 B1.0 S1.0>0"),
        )
    )
    assert full.with_messages() is full and full.computes == schedule and schedule.with_messages() == full
    assert [full.place_of(stage) for stage in range(3)] == [0, 1, 0] and full.stages_of(0) == (0, 2)
    assert check(full).messages == 4 and hash(full) != hash(schedule)
    assert pickle.loads(pickle.dumps(full)) == full


def test_the_nearest_stage_is_served_first() -> None:
    full = one_f_one_b(3, 1).with_messages([(0, 2)])
    assert full.places == tuple(
        map(
            tuple,
            tasks(
                "F0.0 S0.0>1 S0.0>2 R0.0<1 R0.0<2 B0.0",
                "R1.0<0 F1.0 S1.0>2 R1.0<2 B1.0 S1.0>0",
                "R2.0<1 R2.0<0 F2.0 B2.0 S2.0>1 S2.0>0",
            ),
        )
    )


def test_it_prints_as_a_table() -> None:
    schedule = Schedule("mine", 3, 11, tasks("F0.10 F2.0", "F1.0", ""))
    assert str(schedule).splitlines() == [
        "mine: stages 3, microbatches 11, places 3",
        "place 0 | stages 0, 2 | F0.10  F2.0",
        "place 1 | stage 1     | F1.0",
        "place 2 | no stage    |",
    ]


F, S = Kind.FORWARD, Kind.SEND


@pytest.mark.parametrize(
    ("places", "error", "words"),
    [
        ([[Task(F, 2, 0)]], ValueError, "got F2.0 as task 0 of place 0, expected a stage from 0 to 1: there are 2."),
        ([[], [Task(F, 0, 3)]], ValueError, "got F0.3 as task 0 of place 1, expected a microbatch from 0 to 2: there"),
        ([[Task(F, 0, 0, 1)]], ValueError, "with peer=1; only messages have one"),
        ([[Task(S, 0, 0)]], TypeError, "got peer of task 0 of place 0=None, expected an int"),
        ([[Task(S, 0, 0, 2)]], ValueError, "expected a peer from 0 to 1: there are 2."),
        ([[Task(S, 1, 0, 1)]], ValueError, "a message from stage 1 to itself"),
        ([["F0.0"]], TypeError, "got task 0 of place 0='F0.0', expected a Task, such as Task.parse('F0.3') makes"),
        ([[(F, 0, 0, None)]], TypeError, "got task 0 of place 0=tuple, expected a Task"),
        ([Task(F, 0, 0)], TypeError, "got task 0 of place 0=Kind, expected a Task"),
        (7, TypeError, "got places=7, expected a tuple of tasks for each place"),
    ],
)
def test_what_is_no_schedule_is_refused(places: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^Schedule: .*{re.escape(words)}"):
        Schedule("mine", 2, 3, places)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ([(0, 0)], ValueError, "got the edge (0, 0), expected a stage and a later one, from 0 to 2"),
        ([(2, 0)], ValueError, "got the edge (2, 0), expected a stage and a later one"),
        ([(0, 3)], ValueError, "got the edge (0, 3), expected a stage and a later one"),
        ([(0, 2.0)], TypeError, "got a stage of edges=2.0, expected pairs of ints"),
        ([3], TypeError, "got edges=3, expected pairs of ints"),
        (3, TypeError, "got edges=3, expected pairs of ints (source stage, target stage) or None"),
    ],
)
def test_edges_that_lead_nowhere_are_refused(given: Any, error: type[Exception], words: str) -> None:
    for use in (gpipe(3, 2).with_messages, gpipe(3, 2).with_messages().with_messages, lambda e: check(gpipe(3, 2), e)):
        with pytest.raises(error, match=re.escape(words)):
            use(given)


def test_stages_without_a_place_are_refused() -> None:
    apart = Schedule("mine", 2, 1, tasks("F0.0 F1.0", "B1.0 B0.0"))
    with pytest.raises(
        ValueError, match=r"'mine': stage 1 has F1\.0 at place 0 and B1\.0 at place 1, expected all its"
    ):
        check(apart)
    with pytest.raises(ValueError, match=r"'mine': stage 1 has no tasks"):
        check(Schedule("mine", 2, 1, tasks("F0.0 B0.0")))
    with pytest.raises(ValueError, match=r"place_of: got stage=2, expected one from 0 to 1"):
        apart.place_of(2)
    with pytest.raises(ValueError, match=r"^check: place 1 of 'mine' has no tasks; leave it out\."):
        check(Schedule("mine", 1, 1, tasks("F0.0 B0.0", "")))
    with pytest.raises(TypeError, match=r"^check: got schedule=list, expected an fz\.schedules\.Schedule"):
        check([])  # pyright: ignore[reportArgumentType]


ONCE = "as every stage runs each microbatch forward once, and back once, by B0.0 or by I0.0 and W0.0; put it in."


@pytest.mark.parametrize(
    ("places", "words"),
    [
        (("F0.0 B0.0 I0.0 W0.0",), "has B0.0 and I0.0 at place 0, expected B0.0 alone, or I0.0 and W0.0"),
        (("F0.0",), f"has no B0.0 at place 0, expected it, {ONCE}"),
        (("F0.0 I0.0",), f"has no W0.0 at place 0, expected it, {ONCE}"),
        (("F0.0 W0.0",), f"has no I0.0 at place 0, expected it, {ONCE}"),
        (("B0.0",), f"has no F0.0 at place 0, expected it, {ONCE}"),
        (
            ("B0.0 F0.0",),
            "has B0.0 before F0.0 at place 0, as tasks 0 and 1, expected it behind, as a pullback is there",
        ),
        (("F0.0 W0.0 I0.0",), "has W0.0 before I0.0 at place 0, as tasks 1 and 2, expected it behind, as the params'"),
    ],
)
def test_one_stage_that_is_wrong_is_named(places: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"check: 'mine' {words}")):
        check(Schedule("mine", 1, 1, tasks(*places)))


WAITS = (
    "stops after 2 tasks, as places wait for each other: place 0 waits at R0.0<1 for S1.0>0; place 1 waits at R1.1<0 "
    "for S0.1>1. Expected an order in which every send can come before its receive"
)


@pytest.mark.parametrize(
    ("places", "words"),
    [
        (("F1.0 F0.0 B1.0 B0.0",), "has F1.0 before F0.0 at place 0, as tasks 0 and 1, expected it behind, as stage"),
        (("F0.0 F1.0 B0.0 B1.0",), "has B0.0 before B1.0 at place 0, as tasks 2 and 3, expected it behind, as stage"),
        (("F0.0 B0.0 F0.1 B0.1", "F1.1 B1.1 F1.0 B1.0"), WAITS),
    ],
)
def test_two_stages_that_are_wrong_are_named(places: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"check: 'mine' {words}")):
        check(Schedule("mine", 2, len(places), tasks(*places)))


def test_gradients_that_wait_are_counted() -> None:
    schedule = Schedule("mine", 1, 4, tasks("F0.0 F0.1 F0.2 F0.3 I0.0 B0.3 B0.1 W0.0 B0.2"))
    report = check(schedule)
    assert report.waiting == (2,) and report.alive == (4,)
    late = "gradients of params that wait for earlier microbatches: 2 of stage 0"
    assert str(report) == f"pullbacks alive at once, by place: 4; messages: 0; {late}"
