"""The numbers of a run as they become known: to its files, to a bar, and to its user."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NoReturn

from fzero.loops.numbers import SECONDS, STEP, numbers_of
from fzero.loops.rows import Board, Row, Table

if TYPE_CHECKING:  # it may not be installed
    from tqdm import tqdm


class Record:
    """Rows of numbers, and what shows them on the rank that leads.

    Attributes:
        logged: the last row, its numbers by their names.
    """

    def __init__(self, log: str | None, tensorboard: str | None, progress: bool | str | None, every: int) -> None:
        self.logged: dict[str, float] = {}
        self._metrics: Row = {}  # what of it are the step's
        self._log, self._tensorboard, self._progress, self._every = log, tensorboard, progress, every
        self._writers, self._stack = list[Callable[[Row], None]](), contextlib.ExitStack()
        self._bar: tqdm[NoReturn] | None = None
        self._since, self._taken = 0.0, 0  # time counts from here, and the steps taken since
        self._first = 0  # the number of the run's first step

    def __str__(self) -> str:
        return f"every={self._every}"

    def begin(self, done: int, total: int | None, resumed: bool, leads: bool) -> None:
        """Opens what is shown, on the rank that leads.

        Raises:
            ImportError: what shows it is not installed.
            OSError, ValueError: it cannot be written, or another program's file is there.
        """
        self._since, self._first = time.perf_counter(), done + 1
        if not leads:
            return
        if self._log is not None:
            self._writers.append(Table(self._log, resumed).add)
        if self._tensorboard is not None:
            board = Board(self._tensorboard, done if resumed else -1)
            self._writers.append(board.add)
            self._stack.callback(board.close)
        if self._progress is not False:
            self._bar = _bar(self._progress, total, done)
        if self._bar is not None:
            self._stack.callback(self._bar.close)

    def pause(self, seconds: float) -> None:
        """Leaves seconds out of the time that steps take."""
        self._since += seconds

    def taken(self) -> None:
        """One more step."""
        self._taken += 1

    def due(self, done: int) -> bool:
        """Whether there is a row after so many steps: after the run's first one, and every n-th."""
        return done % self._every == 0 or done == self._first

    def read(self, metrics: Mapping[str, object]) -> dict[str, float]:
        """The numbers of a step, which are waited for, and the seconds that steps took until here."""
        row = numbers_of(metrics, "metrics")
        return {**row, SECONDS: (time.perf_counter() - self._since) / self._taken}

    def add(self, done: int, row: Row, evaluated: Row) -> None:
        """One row after so many steps, or more numbers in it, from whose end on time counts anew."""
        if row or self.logged.get(STEP) != done:
            self._metrics = row
        if both := sorted(self._metrics.keys() & evaluated.keys()):
            raise ValueError(
                f"loop: evaluate gave {both}, which are names of the step's metrics or of the log's own columns; "
                "expected others, such as 'held out loss'."
            )
        self.logged = {STEP: done, **self._metrics, **evaluated}
        for write in self._writers:
            write(self.logged)
        self._since, self._taken = time.perf_counter(), 0

    def show(self, done: int, note: str, evaluated: Row) -> None:
        """The bar after so many steps."""
        if self._bar is not None:
            loss = {"loss": self.logged["loss"]} if "loss" in self.logged else {}
            texts = [f"{name} {value:.4g}" for name, value in {**loss, **evaluated}.items()]
            self._bar.set_postfix_str(", ".join([*texts, f"{note}"] if note else texts), refresh=False)
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._stack.close()


def _bar(progress: bool | str | None, total: int | None, done: int) -> tqdm[NoReturn] | None:
    try:
        from tqdm import tqdm
    except ImportError as error:
        if progress is None:
            return None
        raise ImportError(
            f"loop: got progress={progress!r}, which needs the package tqdm: pip install tqdm."
        ) from error
    often = 0.5 if sys.stderr.isatty() else 10
    label = progress if isinstance(progress, str) else None
    return tqdm(total=total, initial=done, desc=label, unit="step", mininterval=often)
