"""The numbers of a run as files: a table of them (CSV), and what TensorBoard reads."""

from __future__ import annotations

import contextlib
import csv
import errno
import fcntl
import io
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Protocol

from fzero.loops.numbers import STEP

Row = Mapping[str, float]
WAIT = 10.0  # seconds, for workers of a killed run, which hold its log until they see that it is gone


class Writer(Protocol):
    """What takes rows."""

    def add(self, row: Row) -> None:
        """Writes one: "step", and numbers by their names. It takes the place of one of the same step."""
        ...

    def back(self, done: int) -> None:
        """The run goes on from so many steps: rows of later ones go."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


class Table:
    """A CSV file with one row for each step that is logged, which is in the file at once.

    Args:
        after: the step that a run goes on after: rows of later ones go as it writes its first one, and at once what a
            killed run has half written. None for a new run, whose file begins anew.

    Raises:
        OSError, ValueError: it cannot be written, or something else than a loop's log is there.
    """

    def __init__(self, path: str, after: int | None) -> None:
        self.path = os.path.realpath(path)  # what a link leads to; wherever the program goes
        self._until = sys.maxsize if after is None else after
        if os.path.isdir(path):
            raise IsADirectoryError(f"loop: got log={path!r}, a folder, expected the path of a file.")
        if os.path.exists(path) and not os.path.isfile(path):  # a device may be read for ever
            raise ValueError(f"loop: got log={path!r}, a device or a pipe, expected the path of a file.")
        if os.path.exists(path) and _is_output(path):  # what is printed would go to a file that is no more
            raise ValueError(
                f"loop: got log={path!r}, which this program's output goes to, expected a file of its own."
            )
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._file = self._claimed(self.path) if os.path.exists(self.path) else None
        try:
            columns, rows = self._found()
            with self._named("so that the log does not begin"):
                self._begin(*((columns, rows) if after is not None else ([], [])))
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Says in an error of the disk, which knows neither, which file it is about, and what is not in it."""
        try:
            yield
        except OSError as error:
            error.strerror, error.filename = f"{error.strerror or error}, {what}", self.path
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

    def _claimed(self, path: str) -> IO[str]:
        """A file that is opened for more, which no other loop writes to meanwhile.

        Raises:
            BlockingIOError: another one does.
        """
        until = time.monotonic() + WAIT
        while True:
            file = self._opened(path)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                if time.monotonic() < until:
                    time.sleep(0.05)
                    continue
                raise BlockingIOError(
                    f"loop: got log={self.path!r}, which another loop writes to, in this process or in another. Give "
                    "each its own; one that is not to go on ends by close()."
                ) from None
            except OSError:  # a filesystem without locks
                return file
            if _is_at(file, path):
                return file
            file.close()  # it was replaced meanwhile

    def _opened(self, path: str) -> IO[str]:
        """A file that is opened for more, and is made where there is none.

        Raises:
            ValueError: something else is there, or another program's file in the place of a new one.
        """
        kind = "no file"
        try:  # a pipe that nobody reads would be waited for
            number = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise
        else:
            file = os.fdopen(number, "a", newline="", encoding="utf-8")
            if stat.S_ISREG(os.fstat(number).st_mode):
                if path == self.path or STEP.encode().startswith(os.pread(number, len(STEP), 0)):
                    return file
                kind = "no log of a loop"
            file.close()
        raise ValueError(
            f"loop: got log={self.path!r}, and {path!r}, which is written first, is {kind}. Move it away, or give "
            "another path."
        )

    def _begin(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        """The file with these rows, to which others are added; the old one stays until it is whole."""
        new = f"{self.path}.new"
        file, old = self._claimed(new), self._file
        try:
            if old is None and os.path.exists(self.path):  # a loop that has begun meanwhile has it
                old = self._claimed(self.path)
            file.truncate(0)
            writer = csv.DictWriter(file, columns, restval="")
            if columns:
                writer.writeheader()
            writer.writerows(rows)
            file.flush()
            os.replace(new, self.path)
        except (OSError, ValueError):
            with contextlib.suppress(OSError):
                os.remove(new)
            with contextlib.suppress(OSError):  # which would be raised again for what is not yet written
                _let_go(file)
            raise
        if old is not None:
            _let_go(old)
        self._file, self._writer, self._at = file, writer, int(rows[-1][STEP]) if rows else -1

    def add(self, row: Row) -> None:
        with self._named(f"so that the row after step {int(row[STEP])} is missing in the log"):
            self._add(row)

    def _add(self, row: Row) -> None:
        assert self._file is not None
        if not _is_at(self._file, self.path):  # rows would go to a file that nobody finds
            raise FileNotFoundError(errno.ENOENT, "it was moved, removed or replaced while the loop ran", self.path)
        columns, step = [*self._writer.fieldnames], int(row[STEP])
        new, last = [name for name in row if name not in columns], min(self._until, step - 1)
        if new or last < self._at:
            self._begin(columns + new, [own for own in self._found()[1] if int(own[STEP]) <= last])
        try:
            self._writer.writerow({name: repr(value) for name, value in row.items()})
            self._file.flush()
        except OSError:
            with contextlib.suppress(OSError):  # as above
                self.close()
            raise
        self._at, self._until = step, sys.maxsize

    def back(self, done: int) -> None:
        self._until = min(self._until, done)

    def close(self) -> None:
        if self._file is not None:
            _let_go(self._file)


def _is_at(file: IO[str], path: str) -> bool:
    """Tells whether a file that is open is the one of this path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _is_output(path: str) -> bool:
    """Tells whether a file is what this program prints to."""
    for number in (1, 2):
        with contextlib.suppress(OSError):  # it is closed
            if os.path.samestat(os.stat(path), os.fstat(number)):
                return True
    return False


def _let_go(file: IO[str]) -> None:
    """Closes a file, which others may then have, also where a process that was forked meanwhile has it, too."""
    if not file.closed:
        with contextlib.suppress(OSError):  # a filesystem without locks
            fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


class Board:
    """A folder of events for TensorBoard, which hides those of later steps than the one that a run goes on after."""

    def __init__(self, path: str, after: int | None) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"loop: got tensorboard={path!r}, which needs the package tensorboard: pip install tensorboard."
            ) from error
        self._open = lambda after: SummaryWriter(path, purge_step=after + 1)
        self._writer, self._last = self._open(-1 if after is None else after), dict[str, float]()

    def add(self, row: Row) -> None:
        known = self._last if self._last.get(STEP) == row[STEP] else {STEP: 0}
        for name in row.keys() - known.keys():
            self._writer.add_scalar(name, row[name], int(row[STEP]))
        self._last = dict(row)

    def back(self, done: int) -> None:
        if self._last.get(STEP, 0) > done:
            self._writer.close()
            self._writer, self._last = self._open(done), {}

    def close(self) -> None:
        self._writer.close()
