"""Tables of the benchmarks: printed row by row and, with `--save`, kept for the documentation.

    python benchmarks/step.py --save                          # writes benchmarks/results/step.json
    python benchmarks/step.py --batch 1 --save step-batch-1
    python benchmarks/results.py                              # fills docs/benchmarks.md from all files

A file says what was run, where and when, and holds the tables: numbers to six digits, null if not measured. The next
run with that name replaces it. A save also fills the page, between `<!-- results: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks.md"
MARKED = re.compile(r"<!-- results: ([\w-]+) -->\n.*?<!-- end -->", re.S)
SETTING = ("OMP_NUM_THREADS", "CXX")
# as the user gave it: scripts change it later
ENVIRONMENT = [f"{name}={shlex.quote(os.environ[name])}" for name in SETTING if name in os.environ]
Cell = str | float | None


class Table:
    """A row for each contender, a cell for each column. Rows are printed as they come, unless `show` is False."""

    def __init__(self, *columns: str, title: str = "", show: bool = True) -> None:
        self.title, self.columns, self.show = title, columns, show
        self.rows: dict[str, dict[str, Cell]] = {}
        self._print(title, columns)

    def row(self, name: str, *cells: Cell) -> None:
        """Adds a row; cells that are left out are not measured. Numbers are floats, counts ints, all else text."""
        found = [float(f"{cell:.6g}") if isinstance(cell, float) else cell for cell in cells]
        found += [None] * (len(self.columns) - len(found))
        self.rows[name] = dict(zip(self.columns, found, strict=True))
        self._print(name, [text for cell in found for text in shown([cell], 3)])

    def _print(self, name: str, cells: Any) -> None:
        if self.show:
            wide = zip(cells, self.columns, strict=True)
            print(f"{name:<38}" + "".join(f"  {cell:>{max(10, len(column))}}" for cell, column in wide), flush=True)


def shown(cells: list[Cell], digits: int = 2) -> list[str]:
    """A column as text: so many decimals below 100, two fewer above, and none that no cell of the column has."""
    floats = [cell for cell in cells if isinstance(cell, float) and math.isfinite(cell)]
    most = max((-int(decimal.Decimal(repr(cell)).as_tuple().exponent) for cell in floats), default=0)

    def text(cell: Cell) -> str:
        if not isinstance(cell, float):
            return f"{cell:,}" if isinstance(cell, int) else cell or ""
        if not math.isfinite(cell):
            return str(cell)
        power = math.floor(math.log10(abs(cell))) if cell else 0
        places = 1 - power if power < -1 else digits - 2 * (power > 1)  # at least two digits of what is small
        return f"{cell:,.{max(0, min(most, places))}f}"

    return [text(cell) for cell in cells]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The parser of a script that calls `save`."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    stem = Path(sys.argv[0]).stem
    made.add_argument(
        "--save", nargs="?", const=stem, type=_name, metavar="NAME", help="in benchmarks/results/NAME.json"
    )
    return made


def _name(text: str) -> str:
    if not re.fullmatch(r"[\w-]+", text):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected letters, digits, '-' and '_'")
    return text


def save(args: argparse.Namespace, *tables: Table) -> None:
    """Writes what a run has found, if `--save` was given."""
    if args.save is None:
        return
    script = Path(sys.argv[0]).resolve().relative_to(ROOT)
    arguments = re.sub(r" --save([ =][\w-]+)?(?= -|$)", "", "".join(f" {shlex.quote(each)}" for each in sys.argv[1:]))
    found = {
        "command": " ".join([*ENVIRONMENT, "python", f"{script}{arguments}"]),
        "machine": machine(getattr(args, "device", "cpu")),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "settings": {name: value for name, value in vars(args).items() if name != "save"},
        "tables": [{"title": table.title, "rows": table.rows} for table in tables if table.rows],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{args.save}.json").write_text(json.dumps(found, indent=1, default=str, ensure_ascii=False) + "\n")
    PAGE.write_text(filled(PAGE.read_text()))


def machine(device: str) -> str:
    import torch

    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.M) if info.exists() else []
    parts = [names[0] if names else platform.processor(), f"{os.cpu_count()} cores"]
    parts += [torch.backends.cpu.get_cpu_capability(), f"torch {torch.__version__}"]
    return ", ".join([torch.cuda.get_device_name(), *parts] if device == "cuda" else parts)


def commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("-dirty" if git("status", "--porcelain", "--", "*.py") else "")


def markdown(rows: dict[str, dict[str, Cell]], title: str = "") -> str:
    """A table, without the columns that have no cell."""
    columns = {name: [row[name] for row in rows.values()] for name in next(iter(rows.values()))}
    columns = {name: cells for name, cells in columns.items() if any(cell is not None for cell in cells)}
    lines = [f"{title}:\n"] if title else []
    sides = ["---" if all(isinstance(cell, str | None) for cell in cells) else "---:" for cells in columns.values()]
    lines += ["| | " + " | ".join(columns) + " |", "|".join(["|---", *sides, ""])]
    for name, *cells in zip(rows, *map(shown, columns.values()), strict=True):
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def filled(page: str) -> str:
    """The page with every file's tables between its marks."""

    def of(mark: re.Match[str]) -> str:
        found = json.loads((RESULTS / f"{mark[1]}.json").read_text())
        tables = [markdown(table["rows"], table["title"]) for table in found["tables"]]
        where = f"`{found['command']}` · {found['machine']} · {found['date']} · commit {found['commit']}"
        return "\n\n".join([f"<!-- results: {mark[1]} -->", *tables, where, "<!-- end -->"])

    return MARKED.sub(of, page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
