"""What a run does now and then: it is judged, and states of it are kept."""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Callable, Mapping

from fzero.checkpoint.checkpoints import Checkpoints
from fzero.checkpoint.save import Saving
from fzero.loops.asked import warn_of
from fzero.loops.ranks import Ranks
from fzero.loops.record import numbers_of
from fzero.state.train_state import TrainState

Evaluate = Callable[..., Mapping[str, object]]

OWN = "loop"  # the part of a checkpoint's `extra` that is the loop's
Extra = Callable[[], Mapping[str, object]]


class Evaluation:
    """Evaluates every so many steps. The first number counts: lower is better, and NaN never is."""

    def __init__(self, evaluate: Evaluate | None, every: int, patience: int | None, best: bool = False) -> None:
        self._evaluate, self._every, self._patience = evaluate, every, patience
        self._judges = best or patience is not None
        self.values: Mapping[str, float] = {}  # the last ones, by name
        self.fresh = True  # whether they are the newest state's
        # the lowest first number so far, and the number of evaluations since then
        self.best: float | None = None
        self.since = 0

    @property
    def over(self) -> bool:
        """Whether it has not become better for too long."""
        return self._patience is not None and self.since >= self._patience

    def due(self, done: int, anyway: bool) -> bool:
        """Whether it is time for it after so many steps, or as a run begins or ends."""
        return self._evaluate is not None and (anyway or done % self._every == 0)

    def look(self, state: object, ranks: Ranks, stop: Callable[[], bool] | None) -> bool:
        """Evaluates; whether this state is the best so far. Where that fails on one rank, all raise.

        Not where a rank is to end by then, which all do as soon as they look at that.
        """
        evaluate = self._evaluate
        assert evaluate is not None
        try:
            own = ranks.by_all(lambda: numbers_of(evaluate(state), "evaluate"))
        except Exception as error:
            if not ranks.asked(stop):
                raise
            warn_of("evaluate", repr(error))
            return False
        values = ranks.means(own)
        if not ranks.alike(repr(values)):
            raise ValueError(
                f"loop: evaluate gave {values} on this rank, and other names on another, or other numbers at another "
                "place of a pipeline; expected the same names on all ranks, and the same numbers at all places."
            )
        if not values and self._judges:
            raise ValueError(
                "loop: got patience or best, and evaluate gave {}, expected at least one number by name: the first one "
                "says what is best."
            )
        self.values, self.fresh = values, True
        if not values:
            return False
        first = next(iter(values.values()))
        better = first < self.best if self.best is not None else first == first
        self.best, self.since = (first, 0) if better else (self.best, self.since + 1)
        return better


class Saves:
    """Checkpoints of a run, in the background, and those of its best states."""

    def __init__(
        self,
        checkpoints: Checkpoints | None,
        every: int | datetime.timedelta | None,
        best: Checkpoints | None,
        extra: Extra | None,
    ) -> None:
        self._checkpoints, self._every, self._best, self._extra = checkpoints, every, best, extra
        self._saving: Saving | None = None
        self._clock, self.saved = 0.0, False  # whether there is a checkpoint of the newest state

    def begin(self, resumed: bool) -> None:
        """From here on time counts; the state that a run goes on from is saved."""
        self._clock, self.saved = time.monotonic(), resumed

    def due(self, done: int) -> bool:
        """Whether it is time for one after so many steps; where that is a time, ranks may differ."""
        if self._checkpoints is None or self._every is None or self.saved or not done:
            return False
        if isinstance(self._every, datetime.timedelta):
            return time.monotonic() - self._clock >= self._every.total_seconds()
        return done % self._every == 0

    def save(self, state: object, known: Mapping[str, object], ranks: Ranks) -> float:
        """Begins to save the newest state, where it is not yet; the seconds that this took."""
        begun = time.perf_counter()
        if self._checkpoints is not None and not self.saved:
            self._begin(self._checkpoints, state, known, ranks)
        self.begin(True)
        return time.perf_counter() - begun

    def save_best(self, state: object, known: Mapping[str, object], ranks: Ranks) -> None:
        """Begins to save a state that is the best so far."""
        if self._best is not None:
            self._begin(self._best, state, known, ranks)

    def _begin(self, kept: Checkpoints, state: object, known: Mapping[str, object], ranks: Ranks) -> None:
        # where that fails on one rank, all raise, and none waits for it in a save
        extra = {} if self._extra is None else ranks.by_all(functools.partial(_others, self._extra))
        assert isinstance(state, TrainState)
        self._saving = kept.save_async(state, {OWN: dict(known), **extra})

    def wait(self) -> None:
        """Waits until what was begun is whole and on the disk."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()


def _others(extra: Callable[[], Mapping[str, object]]) -> dict[str, object]:
    given = dict(extra())
    if OWN in given:
        raise ValueError(f"loop: extra gave the key {OWN!r}, expected others: that one is the loop's.")
    return given
