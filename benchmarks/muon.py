"""A step of fz.muon beside one of fz.adamw and the matmuls of Newton and Schulz alone, under ZeRO-3, interleaved.

    OMP_NUM_THREADS=1 python benchmarks/muon.py
    OMP_NUM_THREADS=1 python benchmarks/muon.py --batch 1        # communication-bound
    OMP_NUM_THREADS=1 python benchmarks/muon.py --update fused   # fz.fuse_update

The GPT of `benchmarks/step.py` on two gloo ranks, float32, donated. Matrices of blocks by muon, all else by adamw. In
every round each contender takes `--steps` steps, in an order drawn anew. "alone" are the products that one rank does
for its own share of the matrices: in bfloat16, or in float32 where this CPU is quicker so. Printed are milliseconds of
a step on rank 0, the median of the rounds, and the median of the ratios of muon's to the sum of the other two.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import results
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from contenders import Training, built, start
from step import batches, setup_of

import fzero as fz
from fzero.optim._muon import orthogonal
from fzero.state.owners import owned
from fzero.state.speed import SLOW, slowdown

UPDATES: dict[str, Callable[[fz.Step], fz.Step]] = {"plain": lambda step: step, "fused": fz.fuse_update}


def training(args: argparse.Namespace, optimizer: Any) -> Training:
    transform = lambda step: UPDATES[args.update](fz.shard_zero3(step))
    step, params = built(setup_of(args), transform, None, optimizer)
    return Training(step, step.init(params))


def on_rank(rank: int, args: argparse.Namespace, store: str, results: Any) -> None:
    start(rank, args.ranks, store, "cpu")
    by_adamw = training(args, fz.adamw(1e-3))
    by_muon = training(args, fz.partition({"*norm*": fz.adamw(1e-3), "blocks.*": fz.muon(1e-3), "*": fz.adamw(1e-3)}))
    tree, layout, data = by_muon.state.params, by_muon.state.layout, batches(args, rank)
    keys = [key for key in layout.trainable if layout.groups[key].row.optimizer.startswith("muon")]
    mine = [slot.shape for key in keys for slot in owned(tree, key)]
    del tree
    dtype = torch.float32 if slowdown(torch.bfloat16) >= SLOW else torch.bfloat16
    matrices = [torch.randn(shape).to(dtype) for shape in mine]

    def alone() -> None:
        for x in matrices:
            orthogonal(x, 5, 1e-7)

    contenders = {"adamw": lambda: by_adamw(*next(data)), "muon": lambda: by_muon(*next(data)), "alone": alone}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    draw = random.Random(0)
    for number in range(args.rounds + 1):
        order = draw.sample(sorted(contenders), len(contenders))
        for name in order:
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(args.steps):
                contenders[name]()
            dist.barrier()
            if number:  # the first round warms up
                times[name].append((time.perf_counter() - begin) / args.steps * 1e3)
    if rank == 0:
        results.put((times, len(mine), str(dtype)))
    dist.destroy_process_group()


def main() -> None:
    parser = results.parser(__doc__)
    for name, default in (("width", 512), ("blocks", 6), ("heads", 8), ("batch", 4), ("context", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("ranks", 2), ("rounds", 7), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--update", choices=sorted(UPDATES), default="plain")
    parser.set_defaults(device="cpu", remat=False)
    args = parser.parse_args()
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_rank, (args, f"file://{folder}/store", queue), args.ranks)  # type: ignore[no-untyped-call]
    times, matrices, dtype = queue.get()
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {args.ranks} ranks, {args.update}")
    table = results.Table("median ms", "ratio")
    for name, each in times.items():
        table.row(name, statistics.median(each))
    ratios = [m / (a + o) for a, m, o in zip(times["adamw"], times["muon"], times["alone"], strict=True)]
    table.row("muon / (adamw + alone)", None, statistics.median(ratios))
    print(f"{matrices} matrices of rank 0 in {dtype}")
    results.save(args, table)


if __name__ == "__main__":
    main()
