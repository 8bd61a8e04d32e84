"""Updates that pause where they wait for what other ranks send, so that something else is done meanwhile."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TypeVar

from fzero.comm.backend import finish_all
from fzero.optim.base import call_fused
from fzero.state.sharded import Sharded
from fzero.table.optimizer import Arrived, GradientTransformation, Paused

T = TypeVar("T")
Wait = Callable[[], Arrived]
Steps = Generator[Wait, Arrived, T]


class Running:
    """Updates on their way: each goes on to its next exchange, or to its end, once `ahead` more have begun."""

    def __init__(self, ahead: int) -> None:
        self._ahead, self._turn = ahead, 0
        self._waiting = collections.deque[tuple[int, Paused, Wait]]()  # since which turn, in the order of exchanges

    @property
    def waits(self) -> list[Wait]:
        """For the exchanges that are on their way."""
        return [wait for _, _, wait in self._waiting]

    def begin(self, paused: Paused) -> None:
        """Runs an update until it waits for an exchange, and then those on whose turn it is."""
        wait = next(paused, None)
        if wait is not None:
            self._waiting.append((self._turn, paused, wait))
            self._go_on()

    def finish(self) -> None:
        """Runs all of them to their ends."""
        while self._waiting:
            self._go_on()

    def _go_on(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._turn - self._ahead:
            _, paused, wait = self._waiting.popleft()
            arrived = wait()
            del wait  # and what this rank has sent
            with contextlib.suppress(StopIteration):
                self._waiting.append((self._turn, paused, paused.send(arrived)))
        self._turn += 1


def run_all(groups: Iterable[Steps[T]], ahead: int) -> list[T]:
    """What updates of some groups return, `ahead` of which are on their way there, and back, while one is computed."""
    running, results = Running(ahead), dict[int, T]()

    def noted(place: int, group: Steps[T]) -> Paused:
        results[place] = yield from group

    try:
        for place, group in enumerate(groups):
            running.begin(noted(place, group))
        running.finish()
    except BaseException:
        with contextlib.suppress(RuntimeError, OSError):  # what came first says more
            finish_all(running.waits)  # they would meet later messages
        raise
    return [results[place] for place in sorted(results)]


def together(groups: Sequence[Steps[T]], ahead: int) -> Steps[list[T]]:
    """The same as one update. It pauses where it is of one group; of several, others run while one waits."""
    if len(groups) > 1:
        return run_all(groups, ahead)
    results = list[T]()
    for group in groups:
        results.append((yield from group))
    return results


def finished(paused: Steps[T]) -> T:
    """What such an update returns, at once."""
    try:
        wait = next(paused)
        while True:
            wait = paused.send(wait())
    except StopIteration as end:
        return end.value


def call_paused(
    member: GradientTransformation, params: Sharded, grads: object, state: object, extra: Mapping[str, object]
) -> Paused:
    """An update of params and state in place: `member.paused`, or one that does not pause."""
    if member.paused is None:
        return call_fused(member, params, grads, state, extra)
    run = member.paused(params, grads, state, **extra)
    del grads, state  # or those of every group that waits would be kept
    return (yield from run)


def combined(member: GradientTransformation, params: object, old: object, parts: Sequence[object]) -> object:
    """The state after an update, of what `call_paused` has returned of each group."""
    return parts[-1] if member.combine is None else member.combine(params, old, parts)
