"""What happened when at each place, simulated or measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fzero.base.arguments import need_int, need_number, need_str, wrong
from fzero.schedules.task import Task


class Span(NamedTuple):
    """One task at one place, from `start` to `end`, in seconds or in the unit of a simulation.

    For a SEND or RECEIVE it is the time that the place waited, which counts as idle.
    """

    place: int
    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each task of a pipeline ran, simulated by `fz.schedules.simulate` or measured with one clock.

    Args:
        spans: (place, task, start, end) of each task, in any order.
        name: for pictures.

    Raises:
        TypeError: not a span.
        ValueError: no spans, or one that ends before it starts or is not finite.

    Example:
        >>> task = fz.schedules.Task.parse
        >>> measured = [(0, task("F0.0"), 7.0, 7.5), (0, task("B0.0"), 8.5, 9.0), (1, task("F1.0"), 7.5, 8.5)]
        >>> timeline = fz.schedules.Timeline(measured)
        >>> timeline.total, timeline.busy, timeline.idle, timeline.bubble
        (2.0, (1.0, 1.0), (1.0, 1.0), 1.0)
    """

    spans: tuple[Span, ...]
    name: str = ""

    def __init__(self, spans: Iterable[tuple[int, Task, float, float]], name: str = "") -> None:
        need_str(name, "Timeline", "name", "a str")
        if not isinstance(spans, Iterable):
            raise wrong("Timeline", "spans", spans, "(place, task, start, end) of each task")
        own = tuple(_span(at, span) for at, span in enumerate(spans))
        if not own:
            raise ValueError("Timeline: got no spans, expected at least one.")
        object.__setattr__(self, "spans", own)
        object.__setattr__(self, "name", name)

    @property
    def places(self) -> int:
        """Number of places."""
        return 1 + max(span.place for span in self.spans)

    @property
    def start(self) -> float:
        """Time at which the first task starts."""
        return min(span.start for span in self.spans)

    @property
    def total(self) -> float:
        """Time from the start of the first task to the end of the last one."""
        return max(span.end for span in self.spans) - self.start

    @property
    def busy(self) -> tuple[float, ...]:
        """For each place, the time in which it computes."""
        return tuple(_covered(self.computing(place)) for place in range(self.places))

    @property
    def idle(self) -> tuple[float, ...]:
        """For each place, the part of `total` in which it does not compute."""
        total = self.total
        return tuple(total - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """`total` minus the largest busy time of a place."""
        return self.total - max(self.busy)

    def computing(self, place: int) -> Iterator[Span]:
        """The spans of a place in which it computes."""
        return (span for span in self.spans if span.place == place and not span.task.is_message)

    def __str__(self) -> str:
        shares = ", ".join(f"{idle / self.total:.0%}" if self.total else "0%" for idle in self.idle)
        return (
            f"{f'{self.name}: ' * bool(self.name)}total {self.total:g}, bubble {self.bubble:g}, idle by place {shares}"
        )


def _span(at: int, span: tuple[int, Task, float, float]) -> Span:
    if not isinstance(span, tuple) or len(span) != 4 or not isinstance(span[1], Task):
        raise wrong("Timeline", f"span {at}", span, "a tuple (place, task, start, end)")
    place, task, *times = span
    need_int(place, "Timeline", f"the place of span {at}", least=0)
    for time in times:
        need_number(time, "Timeline", f"a time of span {at}")
    start, end = times
    if not (math.isfinite(start) and math.isfinite(end) and start <= end):
        raise ValueError(
            f"Timeline: got {task!r} at place {place} from {start} to {end}, expected finite times, the end not before "
            "the start."
        )
    return Span(place, task, start, end)


def _covered(spans: Iterable[Span]) -> float:
    """The length of all spans together, where they overlap counted once."""
    length, last = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.start):
        length += max(0.0, span.end - max(span.start, last))
        last = max(last, span.end)
    return length
