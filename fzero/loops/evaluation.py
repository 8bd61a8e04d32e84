"""What a run is judged by now and then, and whether it still gets better."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fzero.loops.asked import warn_of
from fzero.loops.ranks import Ranks
from fzero.loops.record import numbers_of

Evaluate = Callable[..., Mapping[str, object]]


class Evaluation:
    """Evaluates every so many steps. The first number counts: lower is better, and NaN never is.

    Attributes:
        values: the last ones, by name.
        fresh: whether they are the newest state's.
        best, since: the lowest first number so far, and the number of evaluations since then.
    """

    def __init__(self, evaluate: Evaluate | None, every: int, patience: int | None, best: bool = False) -> None:
        self._evaluate, self._every, self._patience = evaluate, every, patience
        self._judges = best or patience is not None
        self.values: Mapping[str, float] = {}
        self.best: float | None = None
        self.since, self.fresh = 0, True

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
