"""fz.plot_schedule: every task has its bar where it runs, simulated and measured ones alike."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from matplotlib.figure import Figure

import fzero as fz
from fzero.planning.plot_schedule import BAR, HUES
from fzero.schedules import Kind, Schedule, Timeline, Times, dual_pipe_v, gpipe, simulate, zero_bubble
from fzero.testing import strategies


def bars(axes: Any) -> list[tuple[float, float, float]]:
    """(row from the top, start, end) of all bars, sorted."""
    found = []
    for collection in axes.collections:
        if collection.get_facecolor().size:
            for path in collection.get_paths():
                (left, low), (right, high) = path.vertices.min(0), path.vertices.max(0)
                assert high - low == pytest.approx(BAR)
                found.append((round((low + high) / 2, 6), round(left, 6), round(right, 6)))
    return sorted(found)


@given(strategies.schedules())
def test_every_task_has_its_bar(schedule: Schedule) -> None:
    timeline = simulate(schedule, Times(1, 2, 3), send=0.5)
    axes: Any = fz.plot_schedule(schedule, Times(1, 2, 3))
    same: Any = fz.plot_schedule(timeline)
    rows = axes.get_yticks()
    plain = simulate(schedule, Times(1, 2, 3))
    assert bars(axes) == sorted(
        (round(rows[span.place], 6), span.start, span.end) for span in plain.spans if not span.task.is_message
    )
    assert len(bars(same)) == len(bars(axes))
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [f"place {place}   {100 * idle / plain.total:.0f} % idle" for place, idle in enumerate(plain.idle)]


def test_measured_is_drawn_as_simulated_is() -> None:
    timeline = simulate(zero_bubble(3, 5), Times(1, 1, 1))
    later = Timeline([(place, task, 100 + start, 100 + end) for place, task, start, end in timeline.spans], "run")
    axes: Any = fz.plot_schedule({"simulated": timeline, "measured": later})
    found, rows = bars(axes), axes.get_yticks()
    upper = [(start, end) for row, start, end in found if row <= rows[2]]
    assert upper == [(start, end) for row, start, end in found if row > rows[2]] and len(found) == 2 * 45
    heads = [text.get_text() for text in axes.texts if "total" in text.get_text()]
    assert heads == ["simulated: total 17, bubble 2 (12 %)", "measured: total 17, bubble 2 (12 %)"]
    assert len(rows) == 6 and axes.get_xlim() == (0, 17)


@pytest.mark.parametrize(("width", "shown"), [(None, {1: 40, 2: 8}), (5.0, {1: 40, 2: 4}), (1.0, {})])
def test_numbers_stand_where_they_fit(width: float | None, shown: dict[int, int]) -> None:
    given = None if width is None else Figure(figsize=(width, 2)).add_subplot()
    axes: Any = fz.plot_schedule(gpipe(2, 12), axes=given)
    numbers = [text for text in axes.texts if text.get_text().isdigit()]
    assert {digits: sum(len(text.get_text()) == digits for text in numbers) for digits in shown} == shown
    axes.figure.draw_without_rendering()
    renderer = axes.figure._get_renderer()
    boxes = [text.get_window_extent(renderer) for text in numbers]
    spans = [path.get_extents(axes.transData) for own in axes.collections for path in own.get_paths()]
    assert all(any(span.x0 <= box.x0 and box.x1 <= span.x1 for span in spans) for box in boxes)


def test_the_legend_says_what_is_there() -> None:
    def words(*drawn: Schedule) -> list[str]:
        axes: Any = fz.plot_schedule(drawn)
        return [text.get_text() for text in axes.get_legend().get_texts()]

    assert words(gpipe(1, 2)) == ["F forward", "B backward"]
    assert words(gpipe(2, 2)) == ["F forward", "B backward", "waits for a message"]
    halves = ["I gradients of inputs", "W gradients of params"]
    assert words(dual_pipe_v(4, 4)) == [
        "F forward", "B backward", *halves, "paler: a later stage of the place", "waits for a message"
    ]  # fmt: skip
    assert len({HUES[kind] for kind in Kind if kind in HUES}) == 4


def test_several_of_one_name_are_all_drawn(tmp_path: Path) -> None:
    axes: Any = fz.plot_schedule([gpipe(2, 2), gpipe(2, 3)], path=tmp_path / "both.png")
    heads = [text.get_text() for text in axes.texts if "total" in text.get_text()]
    assert heads == ["gpipe: total 9, bubble 3 (33 %)", "gpipe (2): total 12, bubble 3 (25 %)"]
    assert (tmp_path / "both.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((3,), TypeError, "plot_schedule: got schedule=3, expected an fz.schedules.Schedule or Timeline, or several"),
        (([],), ValueError, "plot_schedule: got no schedules; give at least one"),
        ((["gpipe"],), TypeError, "plot_schedule: got schedule 0='gpipe', expected an fz.schedules.Schedule"),
        ((gpipe(2, 2), 3), TypeError, "simulate: got times=3, expected an fz.schedules.Times"),
        ((gpipe(2, 2), None, 3), TypeError, "plot_schedule: got path=3, expected the path of a picture, or None"),
        ((gpipe(2, 2), None, None, 3), TypeError, "plot_schedule: got axes=3, expected axes of matplotlib or None"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        fz.plot_schedule(*arguments)
