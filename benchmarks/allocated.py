"""Bytes of tensors as torch's CPU allocator gives them out, whoever asks for them."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Any

import torch


class Allocated:
    """Counts what the allocator gives to this thread inside, and takes back.

    fz.testing.LiveBytes looks at operations one by one, and does not see what is inside those of a DTensor. The
    profiler does not see what other threads take back, such as gloo's the tensors that they have sent: what is there
    counts until its memory is given out anew.

    Attributes:
        rest, peak: bytes when `at_rest` was called, and at most from then on.
    """

    MARK = "at rest"
    rest = peak = 0

    def __enter__(self) -> Allocated:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def at_rest(self) -> None:
        with torch.profiler.record_function(self.MARK):
            pass

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        profiler: Any = self._profile.profiler
        blocks, marked = Blocks(), False
        tree = profiler.kineto_results.experimental_event_tree()
        for event in sorted(walked(tree), key=lambda event: event.start_time_ns):
            if event.name == self.MARK:
                self.rest, marked = blocks.total, True
            elif event.name == "[memory]":
                _, said = event.typed
                if said.alloc_size > 0:
                    blocks.give(said.ptr, said.alloc_size)
                else:
                    blocks.take(said.ptr)
            if marked:
                self.peak = max(self.peak, blocks.total)


def walked(events: list[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from walked(event.children)


class Blocks:
    """The blocks that are given out; one that overlaps with older ones shows that these were taken back."""

    def __init__(self) -> None:
        self.total = 0
        self._starts: list[int] = []  # in order
        self._sizes: dict[int, int] = {}

    def give(self, start: int, size: int) -> None:
        place = bisect.bisect_left(self._starts, start)
        if place and self._starts[place - 1] + self._sizes[self._starts[place - 1]] > start:
            place -= 1
        while place < len(self._starts) and self._starts[place] < start + size:
            self.take(self._starts[place])
        self._starts.insert(place, start)
        self._sizes[start] = size
        self.total += size

    def take(self, start: int) -> None:
        if start in self._sizes:
            self.total -= self._sizes.pop(start)
            del self._starts[bisect.bisect_left(self._starts, start)]
