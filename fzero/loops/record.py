"""The numbers of a run as they become known: to its files, to a bar, and to its user."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Mapping
from typing import Protocol

import torch

from fzero.base.arguments import named
from fzero.loops.rows import STEP, Board, Table, Writer
from fzero.state.beyond import here
from fzero.table.needs import numbers_in

SECONDS = "seconds"  # of a step, in a row


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
    """

    def __init__(self, log: str | None, tensorboard: str | None, progress: bool | str | None, every: int) -> None:
        self.logged: dict[str, float] = {}
        self._log, self._tensorboard, self._progress, self._every = log, tensorboard, progress, every
        self._writers, self._stack = list[Writer](), contextlib.ExitStack()
        self._bar: Bar | None = None
        self._at, self._since = 0, 0.0  # the step that time counts from, and that time

    def begin(self, done: int, total: int | None, resumed: bool, leads: bool) -> None:
        """Opens what is shown, on the rank that leads.

        Raises:
            ImportError: what shows it is not installed.
            OSError, ValueError: it cannot be written, or another program's file is there.
        """
        self._at, self._since, after = done, time.perf_counter(), done if resumed else None
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

    def due(self, done: int) -> bool:
        """Whether there is a row after so many steps: after the first one that is taken here, and every n-th."""
        return done % self._every == 0 or SECONDS not in self.logged

    def read(self, done: int, metrics: Mapping[str, object]) -> dict[str, float]:
        """The numbers of a step, which are waited for, and the seconds that steps took until here."""
        row = {STEP: done, **numbers_of(metrics, "metrics")}
        seconds = (time.perf_counter() - self._since) / (done - self._at) if done > self._at else math.nan
        return {**row, SECONDS: seconds}

    def add(self, row: dict[str, float], evaluated: Mapping[str, float]) -> None:
        """One row, from whose end on time counts anew."""
        if both := sorted(row.keys() & evaluated.keys()):
            raise ValueError(
                f"loop: evaluate gave {both}, which are names of the step's metrics or of the log's own columns; "
                "expected others, such as 'held out loss'."
            )
        self.logged, self._at = {STEP: self._at, **row, **evaluated}, int(row.get(STEP, self._at))
        for writer in self._writers:
            writer.add(self.logged)
        self._since = time.perf_counter()

    def show(self, done: int, note: str, evaluated: Mapping[str, float]) -> None:
        """The bar after so many steps."""
        if self._bar is not None:
            shown = {name: self.logged[name] for name in ("loss",) if name in self.logged} | {**evaluated}
            texts = [f"{name} {value:.4g}" for name, value in shown.items()]
            self._bar.set_postfix_str(", ".join([*texts, note] if note else texts), refresh=False)
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._stack.close()


def numbers_of(values: object, what: str) -> dict[str, float]:
    """Numbers by their names; one for each member of an ensemble as `loss.0`, `loss.1`, ...; "aux" is left out."""
    if not isinstance(values, Mapping):
        raise TypeError(f"loop: got {named(values)} as {what}, expected a mapping of names to numbers.")
    out: dict[str, float] = {}
    for name, value in here({name: value for name, value in values.items() if name != "aux"}).items():
        if not isinstance(value, (torch.Tensor, int, float)) or (isinstance(value, torch.Tensor) and value.ndim > 1):
            raise TypeError(
                f"loop: got {what}[{name!r}] of {named(value)}, expected a number, or those of an ensemble, a tensor "
                "[members]. Give other values as the step's aux."
            )
        own = numbers_in(value)
        out |= {name: own[0]} if len(own) == 1 else {f"{name}.{i}": each for i, each in enumerate(own)}
    return out


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
