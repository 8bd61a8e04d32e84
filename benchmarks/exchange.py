"""How long ranks wait for one another in an exchange beside a computation, by shared memory and by gloo.

    OMP_NUM_THREADS=1 python benchmarks/exchange.py
    OMP_NUM_THREADS=1 python benchmarks/exchange.py --ranks 4 --compute 1

Every rank multiplies matrices, then sums a tensor over the ranks, and so on. One line per size: milliseconds that an
exchange adds to the computation, the median of the rounds, by the memory that the ranks of one machine share
(`fzero.comm.same_host`), and by gloo, as ranks of several machines do; and torch's `all_reduce` of the same tensor.
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
from step import spawned

import fzero as fz
from fzero.comm import backend

NUMBERS = (512, 1 << 16, 1 << 18)


KINDS = ("shared memory", "gloo", "torch's all_reduce")


def measured(rank: int, args: argparse.Namespace, _: object) -> dict[tuple[int, str], float]:
    ax = fz.parallel.axis(None, "tp")
    a, b = torch.randn(256, 512), torch.randn(512, 1024)
    group = backend.world()
    assert group is not None
    fz.parallel.sum(torch.zeros(1), ax)
    ways = dict(zip(KINDS, (backend._neighbours[group], None, None), strict=True))

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

    found: dict[tuple[int, str], list[float]] = {}
    for _ in range(args.rounds):
        alone = seconds(None)
        for count in NUMBERS:
            x = torch.zeros(count)
            for kind, way in ways.items():
                backend._neighbours[group] = way
                call = (lambda x=x: dist.all_reduce(x)) if kind == KINDS[2] else (lambda x=x: fz.parallel.sum(x, ax))
                found.setdefault((count, kind), []).append(seconds(call) - alone)
    return {key: statistics.median(times) * 1e3 for key, times in found.items()}


def main() -> None:
    parser = results.parser(__doc__)
    for name, default in {"ranks": 2, "compute": 2, "exchanges": 20, "rounds": 11}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    args = parser.parse_args(namespace=argparse.Namespace(device="cpu"))
    found = spawned(measured, args, None)
    table = results.Table(*[f"{kind}, ms" for kind in KINDS])
    for count in NUMBERS:
        table.row(f"{count:,} elements", *[found[count, kind] for kind in KINDS])
    results.save(args, table)


if __name__ == "__main__":
    main()
