"""Times of tasks, timelines of spans, and what they refuse."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fzero.schedules import Schedule, Span, Task, Timeline, Times, gpipe, one_f_one_b, simulate

task = Task.parse


def test_unequal_stages_and_slow_messages() -> None:
    schedule = gpipe(2, 2)
    timeline = simulate(schedule, Times(forward=(1, 2), inputs=(3, 1), params=1), send=0.5)
    found = {repr(span.task): (span.start, span.end) for span in timeline.spans if not span.task.is_message}
    assert found == {
        "F0.0": (0, 1), "F0.1": (1, 2), "F1.0": (1.5, 3.5), "F1.1": (3.5, 5.5),
        "B1.0": (5.5, 7.5), "B1.1": (7.5, 9.5), "B0.0": (8, 12), "B0.1": (12, 16),
    }  # fmt: skip
    assert timeline.total == 16 and timeline.busy == (10, 8) and timeline.idle == (6, 8) and timeline.bubble == 6
    waits = {repr(span.task): (span.start, span.end) for span in timeline.spans if span.task.is_message}
    assert waits["R1.0<0"] == (0, 1.5) and waits["R0.0<1"] == (2, 8) and waits["S0.0>1"] == (1, 1)
    assert timeline.name == "gpipe" and str(timeline) == "gpipe: total 16, bubble 6, idle by place 38%, 50%"
    assert simulate(schedule.with_messages(), {"forward": [1, 2], "inputs": [3, 1], "params": 1}, 0.5) == timeline


def test_skips_are_waited_for() -> None:
    early = Schedule(
        "mine", 3, 1, [[task("F0.0"), task("B0.0")], [task("F1.0"), task("B1.0")], [task("F2.0"), task("B2.0")]]
    )
    plain, skipping = (simulate(early.with_messages(edges), Times(1, 1, 1), send=4) for edges in (None, [(0, 2)]))
    assert skipping.total == plain.total and len(skipping.spans) == len(plain.spans) + 4


def test_measured_spans_begin_when_they_do() -> None:
    timeline = Timeline(
        [(1, task("F1.0"), 12.0, 14.0), (0, task("F0.0"), 10.0, 11.0), (0, task("B0.0"), 10.5, 12.5)], "run"
    )
    assert timeline.start == 10 and timeline.total == 4 and timeline.places == 2
    assert timeline.busy == (2.5, 2)  # where tasks overlap it is counted once
    assert timeline.idle == (1.5, 2) and timeline.bubble == 1.5
    assert timeline.spans[0] == Span(1, task("F1.0"), 12.0, 14.0)
    nothing = Timeline([(0, task("F0.0"), 1.0, 1.0)])
    assert nothing.total == 0 and str(nothing) == "total 0, bubble 0, idle by place 0%"


@pytest.mark.parametrize(
    ("spans", "error", "words"),
    [
        ([], ValueError, "Timeline: got no spans, expected at least one"),
        (3, TypeError, "Timeline: got spans=3, expected (place, task, start, end) of each task"),
        ([(0, "F0.0", 0, 1)], TypeError, "got span 0=tuple, expected a tuple (place, task, start, end)"),
        ([(0, task("F0.0"), 0)], TypeError, "got span 0=tuple, expected a tuple"),
        ([(-1, task("F0.0"), 0, 1)], ValueError, "got the place of span 0=-1, expected at least 0"),
        (
            [(0, task("F0.0"), 2, 1)],
            ValueError,
            "got F0.0 at place 0 from 2 to 1, expected finite times, the end not before",
        ),
        ([(0, task("F0.0"), 0, float("inf"))], ValueError, "got F0.0 at place 0 from 0 to inf, expected finite times"),
        ([(0, task("F0.0"), "0", 1)], TypeError, "got a time of span 0='0', expected a number"),
    ],
)
def test_what_is_no_timeline_is_refused(spans: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        Timeline(spans)


@pytest.mark.parametrize(
    ("times", "error", "words"),
    [
        ({"forward": 1}, ValueError, "simulate: got times of forward, expected forward, inputs, params."),
        ((1, 1, 1), TypeError, "simulate: got times=tuple, expected an fz.schedules.Times or a mapping"),
        (
            Times((1, 2, 3)),
            ValueError,
            "got 3 times for forward, expected a number or one for each of the 2 stages of 'gpipe'",
        ),
        (
            {"forward": -1, "inputs": 1, "params": 1},
            ValueError,
            "Times: got forward=-1, expected a finite number of at least",
        ),
        ({"forward": "1", "inputs": 1, "params": 1}, TypeError, "Times: got forward='1', expected a number"),
        (
            {"forward": 1, "inputs": [1, float("nan")], "params": 1},
            ValueError,
            "Times: got inputs=nan, expected a finite",
        ),
    ],
)
def test_what_are_no_times_is_refused(times: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        simulate(gpipe(2, 2), times)


def test_what_cannot_run_is_not_simulated() -> None:
    with pytest.raises(ValueError, match=r"^simulate: got send=-1, expected a finite number of at least 0"):
        simulate(gpipe(2, 2), Times(), send=-1)
    with pytest.raises(TypeError, match=r"^simulate: got schedule=None"):
        simulate(None, Times())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"has no B0\.0 at place 0"):
        simulate(Schedule("mine", 1, 1, [[task("F0.0")]]), Times())


def test_large_ones_are_quick() -> None:
    assert simulate(one_f_one_b(16, 256), Times(1, 1, 1)).bubble == 45
