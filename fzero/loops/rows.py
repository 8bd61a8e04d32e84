"""The numbers of a run as files: a table of them (CSV), and what TensorBoard reads."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

STEP = "step"
Row = Mapping[str, float]


class Writer(Protocol):
    """What takes rows."""

    def add(self, row: Row) -> None:
        """Writes one: "step", and numbers by their names."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


class Table:
    """A CSV file with one row for each step that is logged, which is in the file at once.

    Args:
        after: the step that a run goes on after: rows of later ones go as it writes its first one, and at once what a
            killed run has half written. None for a new run, whose file begins anew.
    """

    def __init__(self, path: str, after: int | None) -> None:
        self.path = path
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        rows = self._found() if after is not None and os.path.exists(path) else []
        self._begin(rows, [*rows[0]] if rows else [])

    def _found(self) -> list[dict[str, str]]:
        """The whole rows in it."""
        text = Path(self.path).read_text(encoding="utf-8")
        rows = list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines(keepends=True), restval=""))
        if text and not (rows and all(row.get(STEP, "").isdigit() for row in rows)):
            raise ValueError(f"loop: got log={self.path!r}, which is no log of a loop, expected one, or no file.")
        return rows

    def _begin(self, rows: list[dict[str, str]], columns: list[str]) -> None:
        """The file with these rows, to which others are added; the old one stays until it is whole."""
        new = f"{self.path}.new"
        with open(new, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, restval="")
            if columns:
                writer.writeheader()
            writer.writerows(rows)
        os.replace(new, self.path)
        self._file = open(self.path, "a", newline="", encoding="utf-8")
        self._writer, self._at = csv.DictWriter(self._file, columns, restval=""), int(rows[-1][STEP]) if rows else -1

    def add(self, row: Row) -> None:
        columns, step = [*self._writer.fieldnames], int(row[STEP])
        new = [name for name in row if name not in columns]
        if new or step <= self._at:  # another number; or the run goes on from an earlier state
            self._file.close()
            self._begin([own for own in self._found() if int(own[STEP]) < step], columns + new)
        self._writer.writerow({name: repr(value) for name, value in row.items()})
        self._file.flush()
        self._at = step

    def close(self) -> None:
        self._file.close()


class Board:
    """A folder of events for TensorBoard, which hides those of later steps than the one that a run goes on after."""

    def __init__(self, path: str, after: int | None) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"loop: got tensorboard={path!r}, which needs the package tensorboard: pip install tensorboard."
            ) from error
        self._writer = SummaryWriter(path, purge_step=0 if after is None else after + 1)

    def add(self, row: Row) -> None:
        for name, value in row.items():
            if name != STEP:
                self._writer.add_scalar(name, value, int(row[STEP]))

    def close(self) -> None:
        self._writer.close()
