"""Step time and memory of fzero beside DDP, FSDP2, DeepSpeed ZeRO-3 and no communication, interleaved in one run.

    make bench
    OMP_NUM_THREADS=1 python benchmarks/step.py --batch 1        # communication-bound
    OMP_NUM_THREADS=1 python benchmarks/step.py --dtype bfloat16 # float32 masters, bfloat16 compute
    OMP_NUM_THREADS=1 python benchmarks/step.py --remat          # every block rematerialised
    OMP_NUM_THREADS=1 python benchmarks/step.py --ranks 4
    OMP_NUM_THREADS=1 python benchmarks/step.py --keep-memory
    python benchmarks/step.py --device cuda --ranks 1 --dtype bfloat16 --width 2048 --blocks 20 --heads 16 --batch 8 \\
        --context 1024                                           # a GPU: 1.0 billion params

A GPT over bytes on gloo ranks (nccl on CUDA), AdamW, donated. Time: every contender takes `--steps` steps one after
the other, until all that it has started has arrived, and then the next one takes as many, in an order drawn anew for
each round, so that a machine whose speed drifts slows all of them alike. (Single steps in turn would let a contender
leave work under way for the next one to wait for.) Memory: each contender runs alone in fresh processes.

One line per contender:

    median     milliseconds of a step on rank 0, the median of the rounds
    of alone   that over the step without any communication, the median of the ratios within each round
    of FSDP2   the same over FSDP2's
    at rest    MB of live tensor bytes between steps, of one rank (2^20 bytes; of the allocator on CUDA)
    at peak    MB of live tensor bytes at most within a step
    resident   MB resident at most within a step, less that of the process before the model was made (on CPU)

The losses of all that communicate must agree, and so must those of the two that do not, or the run fails: a faster step
that computes something else is none. A peer that is not installed prints "not run" (pip install -e '.[bench]'); so do
the two that shard over one axis and replicate over another where there are fewer than four ranks.

As it is set up glibc returns freed memory to the system and takes it back page by page, which costs contenders up to a
tenth of a step. With `--keep-memory` it keeps what it has while steps are timed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import results
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from contenders import ALL, ALONE, CONTENDERS, Run, Setup, Training, is_here, start

import fzero as fz

MB = 2**20
COMPARED = 25  # steps whose losses must agree: by 50 one example a step has made of torch's own two AdamWs 1e-2
Series = dict[str, list[float]]  # by contender, one of each round or step
Batch = tuple[torch.Tensor, torch.Tensor]


def setup_of(args: argparse.Namespace) -> Setup:
    return Setup(
        args.width,
        args.blocks,
        args.heads,
        getattr(torch, args.dtype),
        args.remat,
        args.device,
        getattr(args, "folder", ""),
        getattr(args, "clipped", True),
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Peers log to stdout while they start."""
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def batches(args: argparse.Namespace, rank: int, vocabulary: int = 256) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        data = torch.randint(0, vocabulary, (args.batch, args.context + 1), generator=generator).to(args.device)
        yield data[:, :-1], data[:, 1:]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(rank: int, args: argparse.Namespace, names: Sequence[str]) -> tuple[Series, Series]:
    """Seconds of a step of every contender in each round, and the losses of all steps."""
    with quiet():
        runs = {name: ALL[name](setup_of(args)) for name in names}
    return in_turns(runs, batches(args, rank), args)


def in_turns(
    runs: dict[str, Run],
    data: Iterator[Batch],
    args: argparse.Namespace,
    names: Sequence[str] = (),
    turn: Callable[[], object] = lambda: None,
) -> tuple[Series, Series]:
    """Seconds of a step of every contender in each round, and the losses of all steps.

    Args:
        names: of all contenders, where each has processes of its own.
        turn: waits there until the one before has done its steps.
    """
    times: Series = {name: [] for name in runs}
    losses: Series = {name: [] for name in runs}
    # whom a contender follows decides in what state it finds the memory
    order, shuffle = list(names or runs), random.Random(0)
    for count in range(args.warmup + args.rounds):
        steps = [next(data) for _ in range(args.steps)]
        shuffle.shuffle(order)
        for name in order:
            turn()
            if name not in runs:
                continue
            synchronize(args.device)
            dist.barrier()
            run = runs[name]
            begin = time.perf_counter()
            found = [run(x, y) for x, y in steps]
            if isinstance(run, Training):
                run.settle()
            synchronize(args.device)
            if count >= args.warmup:
                times[name].append((time.perf_counter() - begin) / args.steps)
            losses[name] += [loss.item() for loss in found]
    turn()
    return times, losses


def resident(field: str) -> int:
    """Bytes of resident memory: VmRSS now, VmHWM at most since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def memory(rank: int, args: argparse.Namespace, name: str) -> tuple[int, int, int | None]:
    """Live bytes at rest and at peak, and resident bytes at peak."""
    cuda = args.device == "cuda"
    before = 0 if cuda else resident("VmRSS")
    live = fz.testing.LiveBytes()
    with contextlib.nullcontext() if cuda else live:
        with quiet():
            run = ALL[name](setup_of(args))
        data = batches(args, rank)
        for _ in range(2):  # the second shows what the first still had to allocate
            run(*next(data))
        if cuda:
            synchronize(args.device)
            rest = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        else:
            rest = live.now()
            live.reset_peak()
        run(*next(data))
    if cuda:
        return rest, torch.cuda.max_memory_allocated(), None
    # while a mode looks, as that of LiveBytes does, each call of a unit is a first one
    for _ in range(2):
        run(*next(data))
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    run(*next(data))
    return rest, live.peak, resident("VmHWM") - before


def on_rank(
    rank: int, measure: Any, args: argparse.Namespace, what: Any, store: str, results: Any, keeps: bool
) -> None:
    if keeps:
        fz.keep_memory()
    start(rank, args.ranks, store, args.device)
    found = measure(rank, args, what)
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def spawned(measure: Any, args: argparse.Namespace, what: Any, keeps: bool = False) -> Any:
    """What `measure(rank, args, what)` finds on rank 0 of fresh processes; `keeps`, after `fz.keep_memory()`."""
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_rank, (measure, args, what, f"file://{folder}/store", results, keeps), nprocs=args.ranks)
    return results.get()


def spawned_apart(
    measure: Any, args: argparse.Namespace, what: Any, names: Sequence[str], keeps: bool = False
) -> dict[str, Any]:
    """Contender -> what `measure(rank, args, (what, name, turns))` finds on rank 0 of fresh processes of its own.

    They are there at the same time and compute in turns: `turns.wait()` is a barrier of them all.
    """
    context = multiprocessing.get_context("spawn")
    results, turns = {name: context.SimpleQueue() for name in names}, context.Barrier(len(names) * args.ranks)
    with tempfile.TemporaryDirectory() as folder:
        running: list[Any] = []
        for number, name in enumerate(names):
            own = (measure, args, (what, name, turns), f"file://{folder}/store{number}", results[name], keeps)
            running.append(mp.spawn(on_rank, own, nprocs=args.ranks, join=False))
        for each in running:
            while not each.join():
                pass
    return {name: queue.get() for name, queue in results.items()}


@contextlib.contextmanager
def environment(said: dict[str, str]) -> Iterator[None]:
    """For the processes that are started inside."""
    before = dict(os.environ)
    os.environ.update(said)
    try:
        yield
    finally:
        for name in said:
            os.environ.pop(name)
        os.environ.update(before)


def check_losses(losses: Series, tolerance: float) -> None:
    losses = {name: own[:COMPARED] for name, own in losses.items()}
    alone = [name for name in (ALONE, "fzero", "fzero, jit") if name in losses]
    for names in (alone, [name for name in losses if name not in alone]):
        for name in names[1:]:
            gap = max(abs(a - b) / abs(b) for a, b in zip(losses[name], losses[names[0]], strict=True))
            if gap > tolerance:
                raise SystemExit(f"{name} computes something else than {names[0]}: losses differ by {gap:.1e}")
    print(f"losses agree within {tolerance:.0e} (relative, {len(next(iter(losses.values())))} steps)")


def ratio(times: Series, name: str, other: str) -> float:
    return statistics.median(a / b for a, b in zip(times[name], times[other], strict=True))


def main() -> None:
    parser = results.parser(__doc__)
    sizes = {"ranks": 2, "width": 512, "blocks": 6, "heads": 8, "batch": 4, "context": 128}
    sizes |= {"warmup": 1, "rounds": 9, "steps": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--remat", action="store_true", help="rematerialise every block")
    parser.add_argument("--only", nargs="*", default=[], help=f"some of: {', '.join(CONTENDERS)} (and what they need)")
    parser.add_argument("--no-memory", action="store_true", help="time only")
    parser.add_argument("--keep-memory", action="store_true", help="malloc keeps its memory while steps are timed")
    args = parser.parse_args()
    chosen = [n for n in CONTENDERS if not args.only or n in (*args.only, ALONE, "FSDP2")]
    names = [name for name in chosen if is_here(name, args.ranks)]
    said = {key: value for key, value in vars(args).items() if key not in ("only", "no_memory", "save")}
    print(" ".join(f"{key}={value}" for key, value in said.items()), flush=True)
    times, losses = spawned(timed, args, names, keeps=args.keep_memory)
    check_losses(losses, 1e-4 if args.dtype == "float32" else 2e-2)
    table = results.Table("median ms", "of alone", "of FSDP2", "live MB at rest", "live MB at peak", "resident MB")
    for name in chosen:
        if name not in names:
            table.row(name, "not run")
            continue
        sizes = () if args.no_memory else spawned(memory, args, name)
        median, ratios = statistics.median(times[name]) * 1e3, [ratio(times, name, other) for other in (ALONE, "FSDP2")]
        table.row(name, median, *ratios, *[None if size is None else size / MB for size in sizes])
    others = results.Table("ratio")
    for stage, other in ((3, "DeepSpeed ZeRO-3"), (1, "DDP"), (2, "DDP")):
        if {f"fzero ZeRO-{stage}", other} <= {*names}:
            others.row(f"fzero ZeRO-{stage} of {other}", ratio(times, f"fzero ZeRO-{stage}", other))
    results.save(args, table, others)


if __name__ == "__main__":
    main()
