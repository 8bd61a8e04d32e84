"""Step time and live memory of fzero's stages beside DDP, FSDP2 and no communication, interleaved in one run.

    OMP_NUM_THREADS=1 python benchmarks/step.py
    OMP_NUM_THREADS=1 python benchmarks/step.py --batch 1

Two gloo ranks, a GPT in float32, AdamW, donated. Every contender takes one step in turn, so that a machine whose speed
drifts slows all of them; the table gives medians, and the ratio to FSDP2. Losses must agree, or the run fails.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from transformer import Transformer

import fzero as fz


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def fzero_step(module: torch.nn.Module, shard: Callable[[fz.Step], fz.Step]) -> Callable[..., float]:
    apply, params = fz.functional(module)
    step = fz.donate(shard(fz.train_step(lambda p, x, y: loss_of(apply(p, x), y), fz.adamw(1e-3))))
    state = step.init(params)

    def run(x: torch.Tensor, y: torch.Tensor) -> float:
        nonlocal state
        state, metrics = step(state, x, y)
        return metrics["loss"].item()

    return run


def torch_step(module: torch.nn.Module, blocks: Any, wrap: str) -> Callable[..., float]:
    model = module
    if wrap == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(module)
    elif wrap == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)

    def run(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    return run


def run_rank(rank: int, args: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=args.ranks)

    def module() -> Any:
        return Transformer(args.width, args.blocks, args.heads, torch.Generator().manual_seed(0))

    contenders: dict[str, Callable[..., float]] = {}
    for name, make in {
        "no communication": lambda m: torch_step(m, m.blocks, "alone"),
        "DDP": lambda m: torch_step(m, m.blocks, "ddp"),
        "FSDP2": lambda m: torch_step(m, m.blocks, "fsdp2"),
        "fzero, unsharded": lambda m: fzero_step(m, lambda s: s),
        "fzero, ZeRO-1": lambda m: fzero_step(m, fz.shard_zero1),
        "fzero, ZeRO-2": lambda m: fzero_step(m, fz.shard_zero2),
        "fzero, ZeRO-3": lambda m: fzero_step(m, fz.shard_zero3),
    }.items():
        contenders[name] = make(module())
    generator = torch.Generator().manual_seed(rank)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, list[float]] = {name: [] for name in contenders}
    for count in range(args.warmup + args.steps):
        data = torch.randint(0, 256, (args.batch, args.context + 1), generator=generator)
        for name, run in contenders.items():
            dist.barrier()
            start = time.perf_counter()
            losses[name].append(run(data[:, :-1], data[:, 1:]))
            if count >= args.warmup:
                times[name].append(time.perf_counter() - start)
    if rank == 0:
        reference = statistics.median(times["FSDP2"])
        print(f"{'contender':<18} {'median ms':>10} {'of FSDP2':>9}")
        for name, taken in times.items():
            median = statistics.median(taken)
            print(f"{name:<18} {median * 1e3:>10.1f} {median / reference:>9.3f}")
        for name in ("fzero, ZeRO-1", "fzero, ZeRO-2", "fzero, ZeRO-3", "DDP"):
            gap = max(abs(a - b) / abs(b) for a, b in zip(losses[name], losses["FSDP2"], strict=True))
            print(f"largest relative difference of losses, {name} to FSDP2: {gap:.1e}")
            assert gap < 1e-5, f"{name} computes something else"
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"ranks": 2, "width": 512, "blocks": 6, "heads": 8, "batch": 4, "context": 128, "warmup": 2, "steps": 9}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (args, f"file://{folder}/store"), nprocs=args.ranks)


if __name__ == "__main__":
    main()
