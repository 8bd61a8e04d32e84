"""Trains for many steps with everything on a disk, and says what grew: files, threads, live and resident memory.

`make lasting STEPS=1000`. Exits with 1 where anything did after the first tenth, resident memory by more than 2 MB.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from failing import FUSED, X, at_rest, model, steps

import fzero as fz
from fzero.testing import LiveBytes

MOST = 2.0  # MB that the C library may come to hold besides


def resident() -> float:
    """MB of resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def lasting(disk: fz.Disk, fused: str, updates: int, looks: list[int]) -> Iterator[dict[str, float]]:
    """What there is after some of the updates; files lie in the disk's folder."""
    step = steps(disk, fused)[0]
    with LiveBytes() as live:
        state = step.init(model()[1])
        for number in range(1, updates + 1):
            state, _ = step(state, X)
            if number in looks:
                at_rest(state)
                gc.collect()
                (folder,) = Path(disk.path).iterdir()
                yield {
                    "files": len(list(folder.iterdir())),
                    "descriptors": len(os.listdir("/proc/self/fd")),
                    "threads": threading.active_count(),
                    "live MB": live.now() / 2**20,
                    "resident MB": resident(),
                }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    count = parser.parse_args().steps
    grown = False
    for fused in FUSED:
        looks = [max(1, count * tenth // 10) for tenth in (1, 4, 7, 10)]
        with tempfile.TemporaryDirectory() as path:
            found = []
            for number, seen in zip(looks, lasting(fz.Disk(path, threads=1), fused, count, looks), strict=True):
                found.append(seen)
                words = ", ".join(f"{value:.6g} {name}" for name, value in seen.items())
                print(f"{fused}, update {number}: {words}", flush=True)
            first, last = found[0], found[-1]
            grown |= any(last[name] > first[name] + MOST * (name == "resident MB") for name in first)
    return int(grown)


if __name__ == "__main__":
    sys.exit(main())
