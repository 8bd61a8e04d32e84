"""What `metrics=("leaf_norms",)` costs: updates with and without it in turns, beside the step that they are part of.

    OMP_NUM_THREADS=1 python benchmarks/leaf_norms.py
    OMP_NUM_THREADS=1 python benchmarks/leaf_norms.py --width 256 --ranks 1

The GPT of benchmarks/step.py, donated. One line per step: milliseconds of a step and of its update without the
norms (medians), what they add to the update (the median of the differences of updates that follow one another), and
that over the step. The norms add nothing elsewhere: gradients are measured in any step. Last the ratio of whole steps
with and without, the median over pairs, which is less certain.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import results
import torch
import torch.distributed as dist
from contenders import ADAMW, Setup, built
from step import batches, quiet, schedule, spawned

import fzero as fz

STEPS: dict[str, tuple[Callable[[fz.Step], fz.Step], fz.Policy | None, fz.GradientTransformation]] = {
    "unsharded": (lambda step: step, None, ADAMW),
    "ZeRO-1": (fz.shard_zero1, None, ADAMW),
    "ZeRO-3": (fz.shard_zero3, None, ADAMW),
    "ZeRO-3, clipped": (fz.shard_zero3, None, fz.chain(fz.clip_by_global_norm(1.0), ADAMW)),
    "ZeRO-3, exact()": (fz.shard_zero3, fz.Policy.exact(), ADAMW),
    "ZeRO-3, compact16()": (fz.shard_zero3, fz.Policy.compact16(), ADAMW),
    "ZeRO-3, muon": (fz.shard_zero3, None, fz.partition({"blocks.*.attention.*.weight": fz.muon(1e-3), "*": ADAMW})),
}


def timed(rank: int, args: argparse.Namespace, names: list[str]) -> dict[str, list[list[float]]]:
    """Step -> seconds of whole steps without and with the norms, of updates without and with them."""
    found = {}
    for name in names:
        transform, policy, optimizer = STEPS[name]
        with quiet():
            step, params = built(Setup(args.width, args.blocks, 8), transform, policy, optimizer)
        steps = [step, dataclasses.replace(step, metrics=("leaf_norms",))]
        states, data = [own.init(params) for own in steps], batches(args, rank)
        x, y = next(data)
        pairs = [own.vjp(state, x, y) for own, state in zip(steps, states, strict=True)]
        grads = [pullback(torch.ones_like(out))[0] for out, pullback in pairs]
        del pairs
        times: list[list[float]] = [[], [], [], []]

        def measured(place: int, call: Callable[[], Any], times: Any = times) -> Any:
            dist.barrier()
            begin = time.perf_counter()
            out = call()
            dist.barrier()
            times[place].append(time.perf_counter() - begin)
            return out

        schedule(True)
        for count in range(args.updates):
            for i in (0, 1) if count % 2 else (1, 0):
                states[i], _ = measured(2 + i, lambda i=i: steps[i].update(states[i], grads[i]))
        for count in range(args.steps):
            for i in (0, 1) if count % 2 else (1, 0):
                states[i], _ = measured(i, lambda i=i: steps[i](states[i], x, y))
        found[name] = [each[len(each) // 10 + 1 :] for each in times]
    return found


def main() -> None:
    parser = results.parser(__doc__)
    sizes = {"ranks": 2, "width": 512, "blocks": 6, "batch": 4, "context": 128, "updates": 60, "steps": 4}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--only", nargs="*", default=[], help=f"some of: {', '.join(STEPS)}")
    args = parser.parse_args()
    args.device = "cpu"
    names = [name for name in STEPS if name in args.only or not args.only]
    table = results.Table("step ms", "update ms", "norms add ms", "% of a step", "steps with / without")
    for name in names:
        plain, measured, without, with_norms = spawned(timed, args, [name])[name]
        step, added = (
            statistics.median(plain),
            statistics.median(b - a for a, b in zip(without, with_norms, strict=True)),
        )
        ratio = statistics.median(b / a for a, b in zip(plain, measured, strict=True))
        table.row(name, step * 1e3, statistics.median(without) * 1e3, added * 1e3, 100 * added / step, ratio)
    results.save(args, table)


if __name__ == "__main__":
    main()
