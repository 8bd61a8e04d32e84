"""Checkpoints: a save and a load beside dd, and beside torch's DCP; how long save_async keeps its caller.

    OMP_NUM_THREADS=1 python benchmarks/saving.py

One rank, AdamW's state in float32. All bytes written are durable (fsync) as a time ends, and none that are read lie in
the page cache as it begins. dd writes the bytes of a checkpoint, from memory, and reads them: disks are often quicker
with zeros. dd keeps nothing and checks nothing, so the same bytes are also read into new memory and hashed, by bare
threads that know no state: no load that checks what it reads can be much quicker on that machine. Steps are timed alone
and while a save is under way.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import results
import torch
import torch.distributed.checkpoint as dcp

import fzero as fz

UNIT = 1 << 20  # params
CHUNK = 4 << 20  # bytes that are read and hashed at once


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return sum((unit["w"].view(1024, 1024) @ x).square().mean() for unit in p["units"])  # type: ignore[return-value]


def seconds(job: Callable[[], object]) -> float:
    started = time.perf_counter()
    job()
    return time.perf_counter() - started


def forget(folder: Path) -> None:
    """Leaves nothing of the files in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def written_by_dd(source: Path, path: Path) -> float:
    command = ["dd", f"if={source}", f"of={path}", "bs=8M", "conv=fsync"]
    return seconds(lambda: subprocess.run(command, check=True, capture_output=True))


def read_by_dd(path: Path) -> float:
    command = ["dd", f"if={path}", "of=/dev/null", "bs=8M"]
    return seconds(lambda: subprocess.run(command, check=True, capture_output=True))


def read_and_hashed(path: Path) -> float:
    """Seconds until a file lies in new memory, and each chunk of it has a SHA-256."""
    descriptor, nbytes = os.open(path, os.O_RDONLY), path.stat().st_size

    def part(start: int) -> None:
        own = memory[start : start + CHUNK]
        os.preadv(descriptor, [own], start)
        hashlib.sha256(own).hexdigest()

    def all_parts() -> None:
        with ThreadPoolExecutor((os.cpu_count() or 1) + 1) as pool:
            list(pool.map(part, range(0, nbytes, CHUNK)))

    memory = memoryview(torch.empty(nbytes, dtype=torch.uint8).numpy())  # type: ignore[arg-type]
    try:
        return seconds(all_parts)
    finally:
        os.close(descriptor)


def synced(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--units", type=int, default=85, help="of 2^20 params, 12 bytes each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(0)
    params = {"units": [{"w": torch.randn(UNIT, generator=generator)} for _ in range(args.units)]}
    step = fz.train_step(loss, fz.adamw(1e-3))
    state, x = step.init(params), torch.ones(1024, 1)
    del params
    nbytes = 12 * UNIT * args.units
    print(f"state of {nbytes / 1e9:.2f} GB on {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores")
    top, memory = Path(tempfile.mkdtemp(dir=args.folder)), Path(tempfile.mkdtemp(dir="/dev/shm"))
    fz.save(top / "fz", state)
    source = Path(shutil.copy(max((top / "fz").iterdir(), key=os.path.getsize), memory))
    shutil.rmtree(top / "fz")
    tensors = {f"{kind}.{path}": x for kind, tree in _trees(state) for path, x in tree.items()}
    times: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        times.setdefault(name, []).append(value)

    def saved_by_dcp() -> None:
        dcp.save(tensors, checkpoint_id=top / "dcp")
        synced(top)

    try:
        for _ in range(args.rounds):
            note("dd writes", written_by_dd(source, top / "dd"))
            forget(top)
            note("dd reads", read_by_dd(top / "dd"))
            forget(top)
            note("bare threads read and hash", read_and_hashed(top / "dd"))
            os.unlink(top / "dd")
            note("fz.save", seconds(lambda: fz.save(top / "fz", state)))
            forget(top)
            note("fz.load", seconds(lambda: fz.load(top / "fz", step)))
            shutil.rmtree(top / "fz")
            note("dcp.save, with fsync", seconds(saved_by_dcp))
            forget(top)
            target = {name: torch.empty_like(x) for name, x in tensors.items()}
            note("dcp.load", seconds(functools.partial(dcp.load, target, checkpoint_id=top / "dcp")))
            del target
            shutil.rmtree(top / "dcp")
            note("step alone", seconds(lambda: step(state, x)))
            saving = fz.save_async(top / "fz", state)
            while not saving.done:
                note("step while saving", seconds(lambda: step(state, x)))
            saving.wait()
            started = time.perf_counter()
            future: Any = dcp.async_save(tensors, checkpoint_id=top / "dcp")
            note("dcp.async_save keeps its caller", time.perf_counter() - started)
            future.result()
            shutil.rmtree(top / "dcp")
            shutil.rmtree(top / "fz")
        for _ in range(20):
            started = time.perf_counter()
            saving = fz.save_async(top / "fz", state)
            note("save_async keeps its caller", time.perf_counter() - started)
            saving.wait()
    finally:
        shutil.rmtree(top, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
    table, ratios = results.Table("median ms", "GB/s", "times"), results.Table("ratio")
    middle = {name: statistics.median(found) for name, found in times.items()}
    for name, found in times.items():
        of_state = not name.startswith("step") and "caller" not in name
        table.row(name, 1e3 * middle[name], nbytes / middle[name] / 1e9 if of_state else None, len(found))
    pairs = ("fz.save", "dd writes"), ("fz.load", "dd reads"), ("fz.load", "bare threads read and hash")
    for name, over in pairs:
        ratio = statistics.median([b / a for a, b in zip(times[name], times[over], strict=True)])
        ratios.row(f"rate of {name} / rate of: {over}", ratio)
    ratios.row("step while saving / step alone", middle["step while saving"] / middle["step alone"])
    results.save(args, table, ratios)


def _trees(state: fz.TrainState) -> list[tuple[str, fz.Sharded]]:
    return [("params", state.params), ("mu", state.moments.mu), ("nu", state.moments.nu)]


if __name__ == "__main__":
    main()
