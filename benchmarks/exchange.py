"""How long ranks wait for one another in an exchange beside a computation, and how gloo's threads are scheduled.

    OMP_NUM_THREADS=1 python benchmarks/exchange.py
    OMP_NUM_THREADS=1 python benchmarks/exchange.py --ranks 4 --compute 1

Every rank multiplies matrices, then sums a tensor over the ranks, and so on. One line per size: milliseconds that an
exchange adds to the computation, the median of the rounds, with gloo's transport threads as Linux schedules any thread,
and as fzero has them scheduled (`fzero.comm.transport`); both take turns. The last columns are torch's `all_reduce` of
the same tensor.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import results
from step import schedule, spawned

import fzero as fz

NUMBERS = (512, 1 << 16, 1 << 18)


def measured(rank: int, args: argparse.Namespace, _: object) -> dict[tuple[int, str, bool], float]:
    ax = fz.parallel.axis(None, "tp")
    a, b = torch.randn(256, 512), torch.randn(512, 1024)

    def compute() -> None:
        for _ in range(args.compute):
            torch.mm(a, b)

    def seconds(exchange: Callable[[], object] | None) -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(args.exchanges):
            compute()
            if exchange is not None:
                exchange()
        return (time.perf_counter() - begin) / args.exchanges

    found: dict[tuple[int, str, bool], list[float]] = {}
    for _ in range(args.rounds):
        for yields in (False, True):
            schedule(yields)
            alone = seconds(None)
            for count in NUMBERS:
                x = torch.zeros(count)
                kinds = {"fzero": lambda x=x: fz.parallel.sum(x, ax), "torch": lambda x=x: dist.all_reduce(x)}
                for name, exchange in kinds.items():
                    found.setdefault((count, name, yields), []).append(seconds(exchange) - alone)
    return {key: statistics.median(times) * 1e3 for key, times in found.items()}


def main() -> None:
    parser = results.parser(__doc__)
    for name, default in {"ranks": 2, "compute": 2, "exchanges": 20, "rounds": 11}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    args = parser.parse_args(namespace=argparse.Namespace(device="cpu"))
    found = spawned(measured, args, None)
    how = ("any thread", "yielding")
    table = results.Table(*[f"{name}: {kind}, ms" for name in ("fzero", "torch") for kind in how])
    for count in NUMBERS:
        cells = [found[count, name, yields] for name in ("fzero", "torch") for yields in (False, True)]
        table.row(f"{count:,} elements", *cells)
    results.save(args, table)


if __name__ == "__main__":
    main()
