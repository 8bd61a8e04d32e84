"""For which ranks a thread waits in a collective, as other threads see it."""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fzero.base.context import during, variable


class Wait(NamedTuple):
    """A collective that a thread is in.

    Attributes:
        since: on the monotonic clock, in seconds.
        members: the global ranks of its group.
        words: that name it.
    """

    since: float
    members: tuple[int, ...]
    words: Callable[[], str]


class Waits:
    """What one thread waits for now; None while it computes."""

    now: Wait | None = None

    @contextlib.contextmanager
    def noted(self, members: tuple[int, ...], words: Callable[[], str]) -> Iterator[None]:
        """Inside, the thread waits for these ranks."""
        before, self.now = self.now, Wait(time.monotonic(), members, words)
        try:
            yield
        finally:
            self.now = before


waits: contextvars.ContextVar[Waits | None] = variable("waits", None)


def shown_by(own: Waits) -> during[Waits | None]:
    """Inside, collectives of this thread are noted there."""
    return during(waits, own)


def finish_all(waits: Sequence[Callable[[], object]]) -> None:
    """Calls all of them, also where one fails: what nobody waits for would meet a later message."""
    errors: list[BaseException] = []
    for wait in waits:
        try:
            wait()
        except BaseException as error:
            errors.append(error)
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # or the error and this frame would hold each other, and with them all that it went through
