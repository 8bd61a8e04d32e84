"""Every generator makes what its paper publishes: idle times and peaks exactly, for any number of microbatches."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable

import pytest
from nightly import in_turns, todays

from fzero import schedules
from fzero.schedules import Schedule, Times, check, dual_pipe_v, gpipe, interleaved, one_f_one_b, zero_bubble
from fzero.schedules import simulate as simulated

STAGES, MICROBATCHES = range(1, 7), range(1, 13)
TIMES = [(1, 1, 1), (2, 3, 1), (1, 2, 4), (5, 1, 2)]  # forward, inputs, params
GENERATORS: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "zero_bubble": zero_bubble,
    **{
        f"interleaved{places}": lambda stages, parts, places=places: interleaved(stages, parts, places)
        for places in STAGES
    },
    "dual_pipe_v": dual_pipe_v,
}


def made(name: str, stages: int, microbatches: int) -> Schedule | None:
    """None where there is no such schedule."""
    if stages % (2 if name == "dual_pipe_v" else int(name.removeprefix("interleaved") or 1) if "inter" in name else 1):
        return None
    return GENERATORS[name](stages, microbatches)


@in_turns(3)
@pytest.mark.parametrize("name", GENERATORS)
def test_each_can_run_for_any_number_of_microbatches(name: str) -> None:
    for stages, microbatches in itertools.product(STAGES, MICROBATCHES):
        schedule = made(name, stages, microbatches)
        if schedule is None:
            continue
        report = check(schedule)
        assert not any(report.waiting), "params' gradients come in microbatch order"
        computes = {task for _, task in report.order if not task.is_message}
        assert len(computes) == sum(len(tasks) for tasks in schedule.places)
        assert check(schedule.with_messages()) == report
        crossing = sum(a != b for a, b in itertools.pairwise(schedule.homes))
        assert report.messages == 2 * microbatches * crossing


@in_turns(3)
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_gpipe_and_1f1b_idle_as_published(name: str, times: tuple[int, int, int]) -> None:
    for stages, microbatches in itertools.product(STAGES, MICROBATCHES):
        timeline = simulated(GENERATORS[name](stages, microbatches), Times(*times))
        assert timeline.idle == ((stages - 1) * sum(times),) * stages
        assert timeline.bubble == (stages - 1) * sum(times)


@in_turns(4)
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("chunks", range(1, 5))
def test_interleaved_idles_as_published(chunks: int, times: tuple[int, int, int]) -> None:
    """Of v chunks, each of a v-th of the work, a v-th of what 1F1B idles."""
    for places, rounds in itertools.product(range(1, 6), range(1, 4)):
        timeline = simulated(interleaved(places * chunks, places * rounds, places), Times(*times))
        assert timeline.idle == ((places - 1) * sum(times),) * places
        whole = simulated(one_f_one_b(places, places * rounds), Times(*(chunks * time for time in times)))
        assert timeline.bubble * chunks == whole.bubble and timeline.busy == whole.busy


def test_zb_h1_idles_as_published() -> None:
    """(p - 1)(F + I - W), where W is at most F and I, and microbatches at least p."""
    for stages in STAGES:
        for microbatches in todays(range(stages, 13), of=4):
            for forward, inputs, params in itertools.product(range(1, 5), repeat=3):
                if params <= min(forward, inputs):
                    timeline = simulated(zero_bubble(stages, microbatches), Times(forward, inputs, params))
                    assert timeline.idle == ((stages - 1) * (forward + inputs - params),) * stages


def test_zb_h1_never_takes_longer_than_1f1b_of_equal_times() -> None:
    for stages, microbatches in itertools.product(STAGES, MICROBATCHES):
        totals = [simulated(make(stages, microbatches), Times(1, 1, 1)).total for make in (zero_bubble, one_f_one_b)]
        assert totals[0] < totals[1] if stages > 1 else totals[0] == totals[1]


def test_dual_pipe_v_one_after_the_other() -> None:
    """(p/2 - 1)(F + I - W), where F = I, W is at most F, and microbatches at least p."""
    for places, more in itertools.product(range(1, 5), range(4)):
        for forward in range(1, 5):
            for params in range(1, forward + 1):
                schedule = dual_pipe_v(2 * places, 2 * places + more)
                idle = simulated(schedule, Times(forward, forward, params)).idle
                assert idle == ((places - 1) * (2 * forward - params),) * places


def test_peaks_are_as_published() -> None:
    for stages, parts in itertools.product(STAGES, MICROBATCHES):
        assert check(gpipe(stages, parts)).alive == (parts,) * stages
        assert check(one_f_one_b(stages, parts)).alive == tuple(min(parts, stages - stage) for stage in range(stages))
        assert check(zero_bubble(stages, parts)).alive == (min(parts, stages),) * stages
        assert max(check(zero_bubble(stages, parts)).alive) == max(check(one_f_one_b(stages, parts)).alive)
    for places, chunks, rounds in itertools.product(range(1, 6), range(1, 4), range(1, 4)):
        parts = places * rounds
        alive = [min(chunks * parts, (chunks - 1) * places + 2 * (places - 1 - place) + 1) for place in range(places)]
        assert check(interleaved(places * chunks, parts, places)).alive == tuple(alive)
    for places, more in itertools.product(range(1, 5), range(4)):
        assert check(dual_pipe_v(2 * places, 2 * places + more)).alive == (2 * places + 1,) * places


def test_stages_are_where_the_papers_put_them() -> None:
    assert interleaved(8, 4, 4).homes == (0, 1, 2, 3, 0, 1, 2, 3)
    assert dual_pipe_v(8, 8).homes == (0, 1, 2, 3, 3, 2, 1, 0)
    assert one_f_one_b(3, 1).homes == (0, 1, 2)


@pytest.mark.parametrize(("make", "more"), [(interleaved, (4,)), (dual_pipe_v, ())])
def test_fewer_microbatches_take_at_most_as_long(make: Callable[..., Schedule], more: tuple[int, ...]) -> None:
    """Those of a number that the paper has none for are what is left of the next one."""
    totals = [simulated(make(8, microbatches, *more), Times(2, 3, 1)).total for microbatches in range(1, 17)]
    assert totals == sorted(totals)


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved", "zero_bubble", "dual_pipe_v"])
def test_each_is_at_most_sixty_lines(name: str) -> None:
    file = inspect.getsourcefile(getattr(schedules, name))
    assert file is not None and file.endswith(f"/{name}.py")
    with open(file) as lines:
        assert len(lines.readlines()) <= 60


def test_counts_that_cannot_be_are_refused() -> None:
    for make in (gpipe, one_f_one_b, zero_bubble, dual_pipe_v):
        with pytest.raises(ValueError, match=f"^{make.__name__}: got stages=0, expected at least 1"):
            make(0, 4)
        with pytest.raises(ValueError, match=f"^{make.__name__}: got microbatches=0, expected at least 1"):
            make(2, 0)
        with pytest.raises(TypeError, match=rf"^{make.__name__}: got stages=2\.0, expected an int"):
            make(2.0, 4)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"^dual_pipe_v: got stages=3, expected an even number"):
        dual_pipe_v(3, 4)
    with pytest.raises(ValueError, match=r"^interleaved: got stages=6 for 4 places, expected a multiple of 4"):
        interleaved(6, 4, 4)
    with pytest.raises(ValueError, match=r"^interleaved: got places=0, expected at least 1"):
        interleaved(6, 4, 0)
