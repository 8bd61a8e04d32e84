"""Full leaves of a sharded model, by fz.gather and unit by unit by fz.stream: time, and memory beside the state.

    OMP_NUM_THREADS=1 python benchmarks/stream.py                        # a model of 1.05 GB in float32, two ranks
    OMP_NUM_THREADS=1 python benchmarks/stream.py --units 4 --side 256   # a small one

Times are of calls that take turns, in each round once, in the same processes. Memory is rank 0's resident memory at
its peak less that before the call, in units: the state's slices are no part of it. "kept" copies each leaf into a model
that is there, as an inference engine does. What was copied is compared at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import results
from step import resident, spawned

import fzero as fz

LEAVES = 4  # of a unit


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return sum(((leaf * x).sum() for unit in p["units"] for leaf in unit.values()), x.sum())


def measured(rank: int, args: argparse.Namespace, _: object) -> dict[str, tuple[float, float]]:
    def drawn(number: int) -> Callable[[], torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        return functools.partial(torch.randn, args.side, args.side, generator=generator)

    params = {"units": [{f"w{i}": drawn(LEAVES * unit + i) for i in range(LEAVES)} for unit in range(args.units)]}
    params_of = fz.shard_zero3(fz.train_step(loss, fz.sgd(0.1))).init(params).params
    model = {path: torch.ones(args.side, args.side) for path in params_of}

    def streamed(keep: bool = False, **given: Any) -> None:
        for path, leaf in fz.stream(params_of, **given):
            if keep and leaf is not None:
                model[path].copy_(leaf)

    def gathered(keep: bool = False, **given: Any) -> None:
        full = fz.gather(params_of, "*", **given)
        for path, leaf in full.items() if keep and full else ():
            model[path].copy_(leaf)

    calls: dict[str, Callable[[], None]] = {
        "fz.gather": gathered,
        "fz.stream": streamed,
        "fz.gather, kept": functools.partial(gathered, keep=True),
        "fz.stream, kept": functools.partial(streamed, keep=True),
        "fz.gather, to=0": functools.partial(gathered, to=0),
        "fz.stream, to=0": functools.partial(streamed, to=0),
        "fz.stream, bfloat16": functools.partial(streamed, dtype=torch.bfloat16),
    }
    def seconds(call: Callable[[], None]) -> float:
        dist.barrier()
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    def memory(call: Callable[[], None]) -> int:
        ctypes.CDLL(None).malloc_trim(0)  # or what an earlier call has freed would be there
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        before = resident("VmRSS")
        seconds(call)
        return resident("VmHWM") - before

    peaks = {name: statistics.median([memory(call) for _ in range(args.rounds)]) for name, call in calls.items()}
    times: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for name, call in calls.items():
            times.setdefault(name, []).append(seconds(call))
    for path, leaf in fz.gather(params_of, "*").items():
        assert torch.equal(leaf, model[path])
    unit = 4 * LEAVES * args.side**2
    return {name: (1e3 * statistics.median(times[name]), peaks[name] / unit) for name in calls}


def main() -> None:
    parser = results.parser(__doc__)
    for name, default in {"ranks": 2, "units": 25, "side": 1620, "rounds": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    args = parser.parse_args(namespace=argparse.Namespace(device="cpu"))
    print(f"a model of {16 * args.units * args.side**2 / 1e9:.2f} GB in {args.units} units, {args.ranks} ranks")
    found = spawned(measured, args, None)
    table, ratios = results.Table("median ms", "units of memory"), results.Table("ratio of times")
    for name, cells in found.items():
        table.row(name, *cells)
    for kind in ("", ", kept", ", to=0"):
        ratios.row(f"fz.stream{kind} / fz.gather{kind}", found[f"fz.stream{kind}"][0] / found[f"fz.gather{kind}"][0])
    results.save(args, table, ratios)


if __name__ == "__main__":
    main()
