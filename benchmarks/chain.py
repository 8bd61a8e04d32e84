"""What it costs to chain two components through cotangents, beside the same models in one step.

    OMP_NUM_THREADS=1 python benchmarks/chain.py
    OMP_NUM_THREADS=1 python benchmarks/chain.py --ranks 1

Two gloo ranks, float32, AdamW, donated; half of the blocks in each component. "One step" is a single fz.train_step of
the composition. Both take one step in turn; the ratio is the median of the ratios of neighbouring steps. Losses must
agree, or the run fails.
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
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from transformer import Block, rotary_angles

import fzero as fz

SHARDS: dict[int, Callable[[fz.Step], fz.Step]] = {1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}


class Trunk(nn.Module):
    """Residual blocks: [b, t, width] -> the same."""

    def __init__(self, width: int, blocks: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.rotated = width // heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = rotary_angles(x.shape[1], self.rotated, x.device)
        for block in self.blocks:
            x = block(x, angles)
        return x


def trunk(args: argparse.Namespace, seed: int) -> tuple[Any, dict[str, torch.Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return fz.functional(Trunk(args.width, args.blocks // 2, args.heads))


def contenders(args: argparse.Namespace, stage: int) -> dict[str, Callable[..., float]]:
    first, second = trunk(args, 0), trunk(args, 1)

    def features(p: Any, x: torch.Tensor) -> torch.Tensor:
        return first[0](p, x)

    def loss(p: Any, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(second[0](p, h), y)

    def built(fn: Any) -> fz.Step:
        step = fz.donate(fz.train_step(fn, fz.adamw(1e-4), units=("*blocks.?",)))
        return SHARDS[stage](step) if args.ranks > 1 else step

    whole = built(lambda p, x, y: loss(p["second"], features(p["first"], x), y))
    whole_state = whole.init({"first": first[1], "second": second[1]})
    lower, upper = built(features), built(loss)
    lower_state, upper_state = lower.init(first[1]), upper.init(second[1])

    def one_step(x: torch.Tensor, y: torch.Tensor) -> float:
        nonlocal whole_state
        whole_state, metrics = whole(whole_state, x, y)
        return metrics["loss"].item()

    def chained(x: torch.Tensor, y: torch.Tensor) -> float:
        nonlocal lower_state, upper_state
        h, pull_lower = lower.vjp(lower_state, x, argnums=())
        value, pull_upper = upper.vjp(upper_state, h, y, argnums=0)
        grads_upper, (cotangent, _) = pull_upper(torch.ones_like(value))
        grads_lower, _ = pull_lower(cotangent)
        lower_state, _ = lower.update(lower_state, grads_lower)
        upper_state, _ = upper.update(upper_state, grads_upper)
        if args.ranks > 1:
            dist.all_reduce(value)
        return value.item() / args.ranks

    return {"one step": one_step, "chained": chained}


def run_rank(rank: int, args: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=args.ranks)
    generator = torch.Generator().manual_seed(rank)
    stages = (1, 2, 3) if args.ranks > 1 else (0,)
    runs = {stage: contenders(args, stage) for stage in stages}
    times: dict[int, dict[str, list[float]]] = {stage: {name: [] for name in runs[stage]} for stage in stages}
    for count in range(args.warmup + args.steps):
        x, y = torch.randn(2, args.batch, args.context, args.width, generator=generator)
        for stage in stages:
            losses = []
            for name in sorted(runs[stage], reverse=bool(count % 2)):  # each goes first as often as the other
                dist.barrier()
                start = time.perf_counter()
                losses.append(runs[stage][name](x, y))
                if count >= args.warmup:
                    times[stage][name].append(time.perf_counter() - start)
            assert abs(losses[0] - losses[1]) < 1e-5 * abs(losses[0]), f"stage {stage} computes {losses}"
    if rank == 0:
        print(f"{'stage':>5} {'one step, ms':>13} {'chained, ms':>12} {'ratio':>6}")
        for stage, taken in times.items():
            ratio = statistics.median(c / o for c, o in zip(taken["chained"], taken["one step"], strict=True))
            one, chain = (1e3 * statistics.median(taken[name]) for name in ("one step", "chained"))
            print(f"{stage:>5} {one:>13.1f} {chain:>12.1f} {ratio:>6.3f}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"ranks": 2, "width": 384, "blocks": 6, "heads": 6, "batch": 4, "context": 128, "warmup": 2, "steps": 15}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (args, f"file://{folder}/store"), nprocs=args.ranks)


if __name__ == "__main__":
    main()
