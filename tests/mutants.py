"""Leaves out each wait in turn, and looks whether some test turns red: `make mutants`.

A wait that no test misses is one that the next change may lose without a word. Prints a line for each, and exits with 1
if one survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = [
    "tests/test_schedule.py",
    "tests/test_written.py",
    "tests/transforms/test_fuse_update.py",
    "tests/test_exact.py",
    "tests/test_schemes.py",
    "tests/test_derivatives.py",
    "tests/test_faults.py",
]
# file, the line with the wait, what stands in its place, which of several such lines
WAITS: list[tuple[str, str, str, int]] = [
    ("_schedule.py", "        wait()\n        return full, True", "        return full, True", 0),
    ("_schedule.py", "            wait()\n            if self._pulls", "            if self._pulls", 0),
    ("_schedule.py", "            finish_all([wait for _, wait in ahead.values()])", "            pass", 0),
    ("_schedule.py", "finish_all([self.finish_reduction, *", "finish_all([*", 0),
    ("_schedule.py", "*[op.forget_ahead for op in calls], ", "", 0),
    ("_schedule.py", ", self._end_of_gathers])", "])", 0),
    ("_schedule.py", "                self._end_of_gathers()\n", "                pass\n", 0),
    ("_schedule.py", "                self._end_of_pullback()\n", "                pass\n", 0),
    ("_unit.py", "            self._arriving.pop(key)()\n", "            self._arriving.pop(key)\n", 0),
    ("_unit.py", "self.traversal.schedule.refill(key, full))()", "self.traversal.schedule.refill(key, full))", 0),
    ("_delivery.py", "        self.traversal.schedule.finish_reduction()\n        assert not self._under_way\n", "", 0),
    ("_traversal.py", "        self.schedule.finish_reduction()\n", "", 0),
    ("_update.py", "        finish_all(waits)\n", "", 0),
    ("_update.py", "        finish_all(waits)\n", "", 1),
    ("_use.py", "        wait()\n        cut =", "        cut =", 0),
    ("_collectives.py", "self.start_gather(full, shard, tag)()", "self.start_gather(full, shard, tag)", 0),
    ("_collectives.py", "            wait()\n            if self.copies > 1", "            if self.copies > 1", 0),
    ("_collectives.py", "        wait()\n        return out", "        return out", 0),
    ("_distributed.py", "        arrived()\n        for total", "        for total", 0),
    ("_distributed.py", "            work.wait()\n        works.clear()", "            pass\n        works.clear()", 0),
]


def mutated(text: str, old: str, new: str, which: int) -> str:
    parts = text.split(old)
    assert len(parts) > which + 1, f"{old!r} is not there {which + 1} times: bring tests/mutants.py up to date"
    return old.join(parts[: which + 1]) + new + old.join(parts[which + 1 :])


def survives(file: str, old: str, new: str, which: int) -> bool:
    """Whether all tests pass without this wait."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("fzero", "tests", "pyproject.toml", "examples", "benchmarks"):
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, Path(folder) / name)  # type: ignore[operator]
        target = Path(folder) / "fzero" / file
        target.write_text(mutated(target.read_text(), old, new, which))
        paths = os.pathsep.join([folder, str(Path(folder) / "tests")])
        tests = [test for test in TESTS if (Path(folder) / test).exists()]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=120", *tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        found = next((line for line in done.stdout.splitlines() if line.startswith("FAILED")), "")
        word = "SURVIVES" if done.returncode == 0 else "found   "
        print(f"{word}  {file}: {old.strip().splitlines()[0]}  {found[:100]}", flush=True)
        return done.returncode == 0


def main() -> int:
    chosen = [WAITS[int(i)] for i in sys.argv[1:]] or WAITS
    return int(any([survives(*wait) for wait in chosen]))


if __name__ == "__main__":
    sys.exit(main())
