"""Trains a transformer whose state is eight times as large as the memory that the process may have.

    python examples/bigger_than_memory.py
    python examples/bigger_than_memory.py --limit 2048 --folder /mnt/nvme/scratch

Params, gradients and the moments of Adam, 12 bytes a parameter and more, lie in files; one or two blocks of them are in
memory at a time. The script sets the limit for itself (RLIMIT_DATA: what is allocated, whether it is touched or not),
and the operating system refuses whatever goes beyond it. At the end there is a picture of the memory over time.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import math
import resource
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from launch import add_numbers, parser_of
from torch import Tensor
from train_lm import random_batch, standard_library
from transformer import Transformer

import fzero as fz

MIB = 1 << 20
M_MMAP_THRESHOLD = -3  # of <malloc.h>
Sample = tuple[float, float, float]  # seconds, MiB resident, MiB allocated


def main(args: argparse.Namespace) -> int:
    text, _ = standard_library()
    disk = fz.Disk(args.folder, in_flight=16 * MIB)
    one, two = (state_of(step_of(args, blocks, disk)) for blocks in (1, 2))
    blocks = 1 + math.ceil(max(0.0, args.times * args.limit * MIB - one) / (two - one))
    step, params = step_of(args, blocks, disk)
    print(fz.plan(step, params))
    state_mib = state_of((step, params)) / MIB
    print(f"\nstate {state_mib:,.0f} MiB in {disk.path}; this process has {allocated():,.0f} MiB before it begins")
    print(f"limit {args.limit:,} MiB, {state_mib / args.limit:.1f} times less than the state", flush=True)

    with limited_to(args.limit), Sampler() as sampler:
        generator = torch.Generator().manual_seed(args.seed)
        batch = lambda _: random_batch(text, generator, args, torch.device("cpu"))
        run = fz.loop(step, step.init(params, seed=args.seed), batch, total=args.steps, every=1)
        losses: list[float] = []
        began = time.perf_counter()
        for _, metrics in run:
            losses.append(metrics["loss"].item())
            speed = len(losses) * args.batch * args.context / (time.perf_counter() - began)
            run.note = f"{speed:,.0f} tokens/s, {resident():,.0f} MiB resident"
    args.out.mkdir(parents=True, exist_ok=True)
    draw(sampler.samples, args.limit, state_mib, args.out / "memory.png")
    most = max(sample[1] for sample in sampler.samples)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte in {args.steps} steps, {speed:,.0f} tokens/s")
    print(f"at most {most:,.0f} MiB resident; saved {args.out / 'memory.png'}")
    return 0


def step_of(args: argparse.Namespace, blocks: int, disk: fz.Disk) -> tuple[fz.Step, dict[str, Any]]:
    """The step, and params that are made when they are needed, block by block."""
    module = Transformer(args.width, blocks, args.heads, None)
    apply, params = fz.functional(module)

    def loss_fn(params: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(apply(params, tokens).flatten(0, 1).float(), targets.flatten())

    def made(name: str, shape: torch.Size) -> Tensor:
        generator = torch.Generator().manual_seed(args.seed + zlib.crc32(name.encode()))
        return module.draw(name, torch.empty(shape), generator)

    step = fz.train_step(loss_fn, fz.chain(fz.clip_by_global_norm(1.0), fz.adamw(args.lr)))
    step = fz.offload(step, params=disk, grads=disk, moments=disk, activations=disk)
    step = fz.donate(fz.remat(fz.fuse_update(step, norm="held")))
    return step, {name: functools.partial(made, name, param.shape) for name, param in params.items()}


def state_of(made: tuple[fz.Step, Any]) -> int:
    """Bytes of params, gradients and moments."""
    plan = fz.plan(*made)
    return plan.params + plan.grads + plan.moments


# ---- memory over time


@contextlib.contextmanager
def limited_to(mib: int) -> Iterator[None]:
    """Inside, the operating system refuses this process what it would allocate beyond that."""
    # glibc keeps what is freed for itself, in more and more pieces, unless it is told from what size on to give it back
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (mib * MIB, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def resident() -> float:
    """MiB of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / MIB


def allocated() -> float:
    """MiB that this process has allocated, which is what the limit is for."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) / 1024


class Sampler:
    """Inside, notes the memory of the process every 50 ms."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        began = time.perf_counter()
        while not self._stop.wait(0.05):
            self.samples.append((time.perf_counter() - began, resident(), allocated()))

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def draw(samples: list[Sample], limit: float, state: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    seconds, resident, allocated = zip(*samples, strict=True)
    axes.plot(seconds, allocated, color="tab:blue", alpha=0.4, lw=1, label="allocated")
    axes.plot(seconds, resident, color="tab:blue", lw=1, label="resident")
    for height, color, label in ((limit, "tab:red", "limit"), (state, "gray", "state, on the disk")):
        axes.axhline(height, color=color, ls="--", label=label)
    axes.set(xlabel="seconds", ylabel="MiB", yscale="log")
    axes.set_yticks([2**i for i in range(7, 15) if min(resident) / 2 < 2**i < 2 * state])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.minorticks_off()
    axes.legend(frameon=False, loc="center right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_numbers(
        parser,
        ("limit", 768, "MiB that the process may allocate, what torch takes for itself among them"),
        ("times", 8.0, "how many times as large the state is; the model has as many blocks as that takes"),
        ("width", 512, "features of the residual stream"),
        ("heads", 8, "attention heads of a block"),
        ("context", 128, "bytes of one example"),
        ("batch", 2, "examples a step"),
        ("steps", 10, "updates"),
        ("lr", 1e-4, "learning rate"),
    )
    parser.add_argument(
        "--folder", default=tempfile.gettempdir() + "/fzero-state", help="on a local disk, for the state"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--out", type=Path, default=Path("out/bigger_than_memory"), help="folder for the picture")
    args = parser.parse_args(argv)
    if args.width % (2 * args.heads):
        parser.error(f"--width must be a multiple of 2 * heads = {2 * args.heads} (rotary pairs), got {args.width}")
    return args


if __name__ == "__main__":
    sys.exit(main(options()))
