"""The numbers of a run as they become known: to its files, to a bar, and to its user."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import numbers
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from fzero.base.arguments import named
from fzero.checkpoint.files import Folder
from fzero.state.beyond import here
from fzero.table.needs import numbers_in

if TYPE_CHECKING:  # it may not be installed
    from tqdm import tqdm

Row = Mapping[str, float]
STEP, SECONDS = "step", "seconds"  # of a row: how many were taken, and what one took


class Record:
    """Rows of numbers, and what shows them on the rank that leads."""

    def __init__(self, log: str | None, tensorboard: str | None, progress: bool | str | None, every: int) -> None:
        self.logged: dict[str, float] = {}  # the last row, its numbers by their names
        self._metrics: Row = {}  # what of it are the step's
        self._log, self._tensorboard, self._progress, self._every = log, tensorboard, progress, every
        self._writers, self._stack = list[Callable[[Row], None]](), contextlib.ExitStack()
        self._bar: tqdm[NoReturn] | None = None
        self._since, self._taken = 0.0, 0  # time counts from here, and the steps taken since
        self._first = 0  # the number of the run's first step

    def begin(self, done: int, total: int | None, resumed: bool, leads: bool) -> None:
        """Opens what is shown, on the rank that leads."""
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


# ---- numbers


def numbers_of(values: object, what: str) -> dict[str, float]:
    """Numbers by their names; those of an ensemble as `loss.0`, `loss.1`, ..., of a mapping as `leaf_norms.params.w`.

    "aux" and "collected" are left out.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"loop: got {named(values)} as {what}, expected a mapping of names to numbers.")
    out: dict[str, float] = {}
    numbers = {name: value for name, value in values.items() if name not in ("aux", "collected")}
    for name, value in here(numbers).items():
        if not isinstance(name, str):
            raise TypeError(f"loop: got the name {name!r} in {what}, expected a str.")
        if isinstance(value, Mapping):
            found = {f"{name}.{inner}": x for inner, x in numbers_of(value, f"{what}[{name!r}]").items()}
            names, own = [*found], [*found.values()]
        else:
            own = _floats(value, f"{what}[{name!r}]")
            names = [name] if len(own) == 1 else [f"{name}.{i}" for i in range(len(own))]
        if taken := [each for each in names if each in out or each in (STEP, SECONDS)]:
            raise ValueError(
                f"loop: got {what}[{name!r}] for the column {taken[0]!r} of the log, which has another value there; "
                "expected another name."
            )
        out |= dict(zip(names, own, strict=True))
    return out


def _floats(value: object, place: str) -> list[float]:
    if isinstance(value, torch.Tensor):
        if value.ndim <= 1 and not value.is_complex() and (own := numbers_in(value)):
            return own
    elif isinstance(value, numbers.Real):
        try:
            return [float(value)]
        except OverflowError:
            raise ValueError(f"loop: got {place}, a number that is too large for a float, expected others.") from None
    raise TypeError(
        f"loop: got {place} of {named(value)}, expected a real number, or those of an ensemble, a tensor [members]. "
        "Give other values as the step's aux."
    )


# ---- files


class Table:
    """A CSV file with one row for each step that is logged, which is in the file at once.

    A row takes the place of those of its step and of later ones, which a run that goes back comes to again.

    Args:
        goes_on: whether the rows of the file stay, but for what a killed run has half written.
    """

    def __init__(self, path: str, goes_on: bool) -> None:
        self.path = os.path.realpath(path)  # what a link leads to; wherever the program goes
        if os.path.isdir(path):
            raise IsADirectoryError(f"loop: got log={path!r}, a folder, expected the path of a file.")
        if os.path.exists(path) and not os.path.isfile(path):  # a device may be read for ever
            raise ValueError(f"loop: got log={path!r}, a device or a pipe, expected the path of a file.")
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        columns, rows = self._found()
        with self._named("so that the log does not begin"):
            self._begin(*((columns, rows) if goes_on else ([], [])))

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Says in an error of the disk, which knows neither, which file it is about, and what is not in it."""
        try:
            yield
        except OSError as error:
            error.strerror, error.filename = f"{error.strerror or error}, {what}", error.filename or self.path
            raise

    def _found(self) -> tuple[list[str], list[dict[str, str]]]:
        """The columns, and the whole rows, that are in the file."""
        if not os.path.exists(self.path):
            return [], []
        text = Path(self.path).read_bytes().decode(errors="replace")
        table = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""), restval="")
        rows, columns = list(table), [*(table.fieldnames or ())]
        if text and not (columns[:1] == [STEP] and all(row[STEP].isdigit() for row in rows)):
            raise ValueError(
                f"loop: got log={self.path!r}, a file that is no log of a loop, expected one, or a path for it."
            )
        return columns, rows

    def _begin(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        """The file with these rows, to which others are added; the old one stays until it is whole."""
        (folder, name), new = os.path.split(self.path), f"{self.path}.new"
        if os.path.lexists(new) and not (os.path.isfile(new) and STEP.encode().startswith(_start(new))):
            why = "it is no log of a loop, and would be written over: move it away, or give another path"
            raise FileExistsError(errno.EEXIST, why, new)
        Folder(folder).replace(name, _text(columns, rows, header=bool(columns)))
        self._columns, self._at = columns, int(rows[-1][STEP]) if rows else -1

    def add(self, row: Row) -> None:
        step, new = int(row[STEP]), [name for name in row if name not in self._columns]
        with self._named(f"so that the row after step {step} is missing in the log"):
            if new or step <= self._at:
                self._begin(self._columns + new, [own for own in self._found()[1] if int(own[STEP]) < step])
            with open(self.path, "r+b") as file:  # which is an error where it has gone
                file.seek(0, os.SEEK_END)
                file.write(_text(self._columns, [{name: repr(value) for name, value in row.items()}]))
        self._at = step


def _start(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(len(STEP))


def _text(columns: Sequence[str], rows: Sequence[Mapping[str, str]], header: bool = False) -> bytes:
    """Rows as lines of a table."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


class Board:
    """A folder of events for TensorBoard, which hides those of a run that went back from there on."""

    def __init__(self, path: str, done: int) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"loop: got tensorboard={path!r}, which needs the package tensorboard: pip install tensorboard."
            ) from error
        self._from = lambda step: SummaryWriter(path, purge_step=step)
        self._writer, self._last = self._from(done + 1), dict[str, float]()

    def add(self, row: Row) -> None:
        step, known = int(row[STEP]), self._last
        if not known.items() <= row.items():  # else there are more numbers in the same row
            if step <= known[STEP]:
                self._writer.close()
                self._writer = self._from(step)
            known = {}
        for name in row.keys() - known.keys() - {STEP}:
            self._writer.add_scalar(name, row[name], step)
        self._last = dict(row)

    def close(self) -> None:
        self._writer.close()
