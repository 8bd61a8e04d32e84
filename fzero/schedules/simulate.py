"""fz.schedules.simulate: when each task of a schedule runs, if each takes a given time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from fzero.base.arguments import need_number, wrong
from fzero.schedules.check import check
from fzero.schedules.task import Kind, Schedule, Task, need_schedule
from fzero.schedules.timeline import Span, Timeline

Durations = float | Sequence[float]  # for all stages, or for each


@dataclass(frozen=True)
class Times:
    """How long the tasks of a schedule take, in any one unit: a number for all stages, or one for each stage.

    Args:
        forward: time of a FORWARD of one microbatch.
        inputs: time of an INPUTS of one microbatch.
        params: time of a PARAMS of one microbatch. A BACKWARD takes `inputs + params`.

    Raises:
        TypeError: not a number.
        ValueError: negative or not finite.

    Example:
        >>> times = fz.schedules.Times(forward=(1, 2), inputs=1, params=1)
        >>> times.of(fz.schedules.Task.parse("F1.0")), times.of(fz.schedules.Task.parse("B1.0"))
        (2, 2)
    """

    forward: Durations = 1.0
    inputs: Durations = 1.0
    params: Durations = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            several = isinstance(given, Sequence) and not isinstance(given, str)
            for value in given if several else (given,):
                _need_time(value, "Times", field.name)
            if several:
                object.__setattr__(self, field.name, tuple(given))

    def of(self, task: Task) -> float:
        """Time of a task. Messages take no time of a place."""
        if task.kind is Kind.FORWARD:
            return _of_stage(self.forward, task.stage)
        inputs, params = _of_stage(self.inputs, task.stage), _of_stage(self.params, task.stage)
        return {Kind.INPUTS: inputs, Kind.PARAMS: params, Kind.BACKWARD: inputs + params}.get(task.kind, 0)


def simulate(schedule: Schedule, times: Times | Mapping[str, Durations], send: float = 0.0) -> Timeline:
    """Computes when each task of a schedule runs, if every place starts each task as soon as it can.

    Args:
        schedule: one that `fz.schedules.check` accepts, with messages or without.
        times: a `Times`, or a mapping of `forward`, `inputs` and `params`, each a number or one for each stage.
        send: time from a send to the end of its receive, in the same unit. The sender does not wait.

    Returns:
        A timeline that starts at 0, with `total`, `idle` for each place, and `bubble`.

    Raises:
        TypeError: not a schedule, or not times.
        ValueError: the schedule cannot run, a time is negative, or times are for another number of stages.

    Example:
        >>> times = fz.schedules.Times(forward=1, inputs=1, params=1)
        >>> [fz.schedules.simulate(make(4, 8), times).bubble for make in (fz.schedules.gpipe, fz.schedules.zero_bubble)]
        [9.0, 3.0]
    """
    need_schedule(schedule, "simulate")
    if isinstance(times, Mapping):
        names = [field.name for field in fields(Times)]
        if set(times) != set(names):
            raise ValueError(f"simulate: got times of {', '.join(map(str, times))}, expected {', '.join(names)}.")
        times = Times(**times)
    if not isinstance(times, Times):
        raise wrong("simulate", "times", times, "an fz.schedules.Times or a mapping of forward, inputs, params")
    for field in fields(times):
        given = getattr(times, field.name)
        if isinstance(given, tuple) and len(given) != schedule.stages:
            raise ValueError(
                f"simulate: got {len(given)} times for {field.name}, expected a number or one for each of the "
                f"{schedule.stages} stages of {schedule.name!r}."
            )
    _need_time(send, "simulate", "send")
    clocks: list[float] = [0.0] * len(schedule.places)
    arrives: dict[Task, float] = {}
    spans: list[Span] = []
    for place, task in check(schedule).order:
        start = clocks[place]
        if task.kind is Kind.SEND:
            arrives[task.other_end] = start + send
        elif task.kind is Kind.RECEIVE:
            clocks[place] = max(start, arrives[task])
        else:
            clocks[place] = start + times.of(task)
        spans.append(Span(place, task, start, clocks[place]))
    return Timeline(spans, schedule.name)


def _of_stage(times: Durations, stage: int) -> float:
    return times[stage] if isinstance(times, Sequence) else times


def _need_time(value: object, who: str, argument: str) -> None:
    time = float(need_number(value, who, argument, "a number"))
    if not (math.isfinite(time) and time >= 0):
        raise ValueError(f"{who}: got {argument}={value}, expected a finite number of at least 0.")
