"""The numbers of a run as they become known: to its files, to a bar, and to its user."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Protocol

from fzero.loops.numbers import SECONDS, STEP, numbers_of
from fzero.loops.rows import Board, Table, Writer


class Bar(Protocol):
    """As much of tqdm, which may not be installed, as is used here."""

    n: int

    def set_postfix_str(self, s: str, refresh: bool) -> None: ...

    def update(self, n: int) -> object: ...

    def close(self) -> None: ...


class Record:
    """Rows of numbers, and what shows them on the rank that leads.

    Attributes:
        logged: the numbers of the last row, by their names.
        first: those of a run's first step, where that has no row.
    """

    def __init__(self, log: str | None, tensorboard: str | None, progress: bool | str | None, every: int) -> None:
        self.logged, self.first = dict[str, float](), dict[str, float]()
        self._log, self._tensorboard, self._progress, self._every = log, tensorboard, progress, every
        self._writers, self._stack = list[Writer](), contextlib.ExitStack()
        self._bar: Bar | None = None
        self._since, self._taken = 0.0, 0  # time counts from here, and the steps taken since
        self._back: int | None = None  # the step that the run has gone back to since the last row
        self._first: int | None = None  # the step of the run's first row, once there is one
        self._regular = True  # whether the last row would be there, too, if the run went on

    def __str__(self) -> str:
        return f"every={self._every}"

    def begin(self, done: int, total: int | None, after: int | None, leads: bool) -> None:
        """Opens what is shown, on the rank that leads.

        Args:
            after: the step of a resumed run's log up to which its rows stay; None for a new run.

        Raises:
            ImportError: what shows it is not installed.
            OSError, ValueError: it cannot be written, or another program's file is there.
        """
        self._since, self._first = time.perf_counter(), 0 if after else None
        for kind, path in ((Table, self._log), (Board, self._tensorboard)):
            if path is not None and leads:
                self._writers.append(kind(path, after))
                self._stack.callback(self._writers[-1].close)
        self._bar = _bar(self._progress, total, done) if leads else None
        if self._bar is not None:
            self._stack.callback(self._bar.close)

    def pause(self, seconds: float) -> None:
        """Leaves seconds out of the time that steps take."""
        self._since += seconds

    def taken(self) -> None:
        """One more step."""
        self._taken += 1

    def back(self, done: int) -> None:
        """The run goes on from another state, after so many steps."""
        self._back = done if self._back is None else min(self._back, done)

    def due(self, done: int) -> bool:
        """Whether there is a row after so many steps: after the run's first one, and every n-th."""
        return done % self._every == 0 or self._first in (None, done)

    def kept(self, done: int) -> int:
        """The step up to which rows stay where the run goes on after so many steps."""
        return done if self._regular or self.logged.get(STEP) != done else done - 1

    def read(self, metrics: Mapping[str, object]) -> dict[str, float]:
        """The numbers of a step, which are waited for, and the seconds that steps took until here."""
        row = numbers_of(metrics, "metrics")
        return {**row, SECONDS: (time.perf_counter() - self._since) / self._taken}

    def look(self, done: int, metrics: Mapping[str, object]) -> None:
        """Reads the first step of a run that goes on, which has no row: its numbers are known until there is one."""
        with contextlib.suppress(TypeError, ValueError):  # said of the first row
            self.first = {STEP: done, **self.read(metrics)}

    def add(self, done: int, row: Mapping[str, float], evaluated: Mapping[str, float]) -> None:
        """One row after so many steps, or more numbers in it, from whose end on time counts anew."""
        same = self._back is None and self.logged.get(STEP) == done
        self._regular = bool(evaluated) or (same and self._regular) or not row or self.due(done)
        if row and self._first is None:
            self._first = done
        row = {**(self.logged if same else {STEP: done}), **row}
        if both := sorted(row.keys() & evaluated.keys()):
            raise ValueError(
                f"loop: evaluate gave {both}, which are names of the step's metrics or of the log's own columns; "
                "expected others, such as 'held out loss'."
            )
        self.logged = {**row, **evaluated}
        for writer in self._writers:
            if self._back is not None:
                writer.back(self._back)
            writer.add(self.logged)
        self._since, self._taken, self._back = time.perf_counter(), 0, None

    def show(self, done: int, note: str, evaluated: Mapping[str, float]) -> None:
        """The bar after so many steps."""
        if self._bar is not None:
            shown = {name: self.logged[name] for name in ("loss",) if name in self.logged} | {**evaluated}
            texts = [f"{name} {value:.4g}" for name, value in shown.items()]
            self._bar.set_postfix_str(", ".join([*texts, note] if note else texts), refresh=False)
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._stack.close()


def _bar(progress: bool | str | None, total: int | None, done: int) -> Bar | None:
    if progress is False:
        return None
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
