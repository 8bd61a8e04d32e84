"""Updates that pause where they wait for what other ranks send, so that something else is done meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping

from fzero.comm.waits import finish_all
from fzero.optim.base import call_fused, taken, values
from fzero.table.optimizer import Arrived, GradientTransformation, Paused


class Run:
    """One such update, which has begun; `go_on` waits for its exchange and goes on to the next one, or to the end.

    Attributes:
        wait: for the exchange that is on its way; None at the end.
        result: what it has returned then.
    """

    def __init__(self, paused: Paused) -> None:
        self._paused = paused
        self.result: object = None
        self.wait: Callable[[], Arrived] | None = None
        self._until_it_waits(lambda: next(paused))

    def go_on(self) -> None:
        assert self.wait is not None
        wait, self.wait = self.wait, None
        arrived = wait()
        self._until_it_waits(lambda: self._paused.send(arrived))

    def _until_it_waits(self, run: Callable[[], Callable[[], Arrived]]) -> None:
        try:
            self.wait = run()
        except StopIteration as end:
            self.result = end.value


@contextlib.contextmanager
def awaited(*running: Collection[Run]) -> Iterator[None]:
    """Inside, where something fails, the exchanges of these are waited for: they would meet later messages."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError, OSError):  # what came first says more
            finish_all([run.wait for runs in running for run in runs if run.wait is not None])
        raise


def finished(paused: Paused) -> object:
    """What such an update returns, at once."""
    run = Run(paused)
    while run.wait is not None:
        run.go_on()
    return run.result


def call_paused(
    member: GradientTransformation, params: object, grads: object, state: object, extra: Mapping[str, object]
) -> Paused:
    """`member.paused` with those keywords that it takes, or `member.fused`, which does not pause."""
    if member.paused is None:
        return at_once(member, params, grads, state, extra)
    return member.paused(params, grads if member.by_leaf else values(grads), state, **taken(member.paused, extra))


def at_once(
    member: GradientTransformation, params: object, grads: object, state: object, extra: Mapping[str, object]
) -> Paused:
    """`member.fused`, which does not pause: of several groups one's exchange runs beside another's computation."""
    yield from ()
    return call_fused(member, params, grads, state, extra)
