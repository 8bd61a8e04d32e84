"""Which states of a run are kept, and when."""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Callable, Mapping

from fzero.checkpoint.checkpoints import Checkpoints
from fzero.checkpoint.save import Saving
from fzero.loops.ranks import Ranks
from fzero.state.train_state import TrainState

OWN = "loop"  # the part of a checkpoint's `extra` that is the loop's
Extra = Callable[[], Mapping[str, object]]


class Saves:
    """Checkpoints of a run, in the background, and those of its best states.

    Attributes:
        saved: whether there is a checkpoint of the newest state.
    """

    def __init__(
        self,
        checkpoints: Checkpoints | None,
        every: int | datetime.timedelta | None,
        best: Checkpoints | None,
        extra: Extra | None,
    ) -> None:
        self._checkpoints, self._every, self._best, self._extra = checkpoints, every, best, extra
        self._saving: Saving | None = None
        self._clock, self.saved = 0.0, False

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
