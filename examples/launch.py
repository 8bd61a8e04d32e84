"""Runs an example's `train(rank, ranks, args, stop)` on every rank: processes started here, or those of torchrun.

Ctrl-C asks all ranks to stop after the step that they are in; a second one kills them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LINGER = 60.0  # seconds in which ranks stop and save once the process that started them is gone
Train = Callable[[int, int, argparse.Namespace, Callable[[], bool]], None]


def launch(train: Train, args: argparse.Namespace) -> int:
    """Runs `train` on `args.ranks` ranks; the process's exit status."""
    if "RANK" in os.environ:  # torchrun
        _run_here(train, int(os.environ["RANK"]), args, "env://")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/store"
        if args.ranks > 1:
            return _run_spawned(train, args, rendezvous)
        _run_here(train, 0, args, rendezvous)
    return 0


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace, *stages: int) -> None:
    """Refuses numbers of ranks that do not fit the stages or torchrun, and widths that heads do not divide."""
    if args.seed < 0:
        parser.error("--seed must not be negative")
    if args.width % (2 * args.heads):
        parser.error(f"--width must be a multiple of 2 * heads = {2 * args.heads} (rotary pairs), got {args.width}")
    world = int(os.environ.get("WORLD_SIZE", 0))
    if 0 in stages and args.ranks > 1:
        parser.error(f"stage 0 shards and averages nothing, so it needs --ranks 1; got {args.ranks} ranks")
    if world and args.ranks != world:
        parser.error(f"--ranks {args.ranks}, but torchrun started {world}; leave --ranks out")


def check_folder(parser: argparse.ArgumentParser, out: Path) -> None:
    """Refuses a folder that cannot be written to, before any time is spent."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        parser.error(f"--out {out} cannot be written to: {error.strerror}")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def parser_of(description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=description, formatter_class=_Formatter)


def add_numbers(parser: argparse.ArgumentParser, *numbers: tuple[str, float, str]) -> None:
    """Options that are positive numbers: (name, default, help), whole where the default is."""
    for name, default, text in numbers:
        parser.add_argument(f"--{name}", type=_whole if isinstance(default, int) else _real, default=default, help=text)


def _whole(text: str) -> int:
    return int(_positive(text, int, "a whole number of at least 1"))


def _real(text: str) -> float:
    return _positive(text, float, "a positive number")


def _positive(text: str, kind: Callable[[str], float], expected: str) -> float:
    with contextlib.suppress(ValueError):
        if kind(text) > 0:
            return kind(text)
    raise argparse.ArgumentTypeError(f"got {text}, expected {expected}")


def default_ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", 2))


def device_of(rank: int, ranks: int) -> torch.device:
    """One CUDA device a rank where there are enough, the CPU otherwise."""
    local, here = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return torch.device("cuda", local) if torch.cuda.device_count() >= here else torch.device("cpu")


def matmul_ms(dtype: torch.dtype) -> float:
    """Milliseconds of one thread's own time that a small matmul takes on this CPU; measured in about 30 of them."""
    threads, x = torch.get_num_threads(), torch.ones(256, 256, dtype=dtype)
    torch.set_num_threads(1)
    best, end = float("inf"), time.thread_time() + 0.03
    while time.thread_time() < end:  # the first one also loads the kernel
        started = time.thread_time()
        torch.mm(x, x)
        best = min(best, time.thread_time() - started)
    torch.set_num_threads(threads)
    return 1e3 * best


def memory_mib(device: torch.device) -> float:
    """What this rank occupies now: CUDA memory allocated, or resident memory (where it cannot be read, its peak)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**20
    if Path("/proc/self/statm").exists():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def _run_rank(rank: int, train: Train, args: argparse.Namespace, rendezvous: str, stop: Any) -> None:
    device = device_of(rank, args.ranks)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.ranks))
    parent = mp.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", init_method=rendezvous, rank=rank, world_size=args.ranks
    )
    try:
        train(rank, args.ranks, args, lambda: stop.is_set() or (parent is not None and not parent.is_alive()))
    finally:
        dist.destroy_process_group()


def _end_after(parent: Any) -> None:
    """Nobody else would end a rank that waits for one which was killed, too."""
    parent.join()
    time.sleep(LINGER)
    os._exit(1)


def _run_here(train: Train, rank: int, args: argparse.Namespace, rendezvous: str) -> None:
    """This process is a rank; a signal asks it to stop. Under torchrun one Ctrl-C may come twice."""
    stop = threading.Event()

    def handle(number: int, _: Any) -> None:
        stop.set()
        if args.ranks == 1:
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    _run_rank(rank, train, args, rendezvous, stop)


def _run_spawned(train: Train, args: argparse.Namespace, rendezvous: str) -> int:
    """Starts the ranks. Signals do not reach them from their very start; this process passes the wish to stop on."""
    stop = mp.get_context("spawn").Event()
    signals = (signal.SIGINT, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # inherited
    context = mp.spawn(_run_rank, (train, args, rendezvous, stop), nprocs=args.ranks, join=False)
    assert context is not None

    def handle(number: int, _: Any) -> None:
        if stop.is_set():
            for process in mp.active_children():
                process.kill()
            sys.exit(128 + number)
        stop.set()

    for number in signals:
        signal.signal(number, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)  # one that came meanwhile is handled now
    name = Path(sys.argv[0]).stem
    try:
        while not context.join(grace_period=2):
            pass
    except mp.ProcessExitedException as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except mp.ProcessRaisedException as error:
        print(f"{name}: a rank failed. {error}", file=sys.stderr)
        return 1
    return 0
