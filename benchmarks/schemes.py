"""Bytes a parameter and step time of every storage scheme under ZeRO-3, beside FSDP2's and DeepSpeed's, in one run.

    OMP_NUM_THREADS=1 python benchmarks/schemes.py

The model, the ranks and the way of measuring are those of `benchmarks/step.py`; all compute in bfloat16, but for
FSDP2's first line. One line per contender:

    median         milliseconds of a step on rank 0, median
    of masters     that over the step of "fp32 masters" (fzero), the median of the ratios of neighbouring steps
    at rest, peak  bytes of live tensors over params, of all ranks: between steps, at most within one
    loss           after the last step, nats a byte: all see the same batches
"""

from __future__ import annotations

import statistics

import results
from contenders import SCHEMES, Setup, is_here
from step import memory, ratio, spawned, timed


def main() -> None:
    parser = results.parser(__doc__)
    sizes = {"ranks": 2, "width": 512, "blocks": 6, "heads": 8, "batch": 4, "context": 128}
    sizes |= {"warmup": 1, "rounds": 9, "steps": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    args = parser.parse_args()
    args.dtype, args.device, args.remat = "bfloat16", "cpu", False
    names = [name for name in SCHEMES if is_here(name, args.ranks)]
    times, losses = spawned(timed, args, names)
    params = sum(p.numel() for p in Setup(args.width, args.blocks, args.heads).module().parameters())
    print(f"{params:,} params, {args.ranks} ranks")
    table = results.Table("median ms", "of fp32 masters", "bytes/param at rest", "bytes/param at peak", "loss")
    for name in SCHEMES:
        if name not in names:
            table.row(name, "not run")
            continue
        rest, peak, _ = spawned(memory, args, name)
        sizes = [size * args.ranks / params for size in (rest, peak)]
        median = statistics.median(times[name]) * 1e3
        table.row(name, median, ratio(times, name, "fp32 masters"), *sizes, losses[name][-1])
    results.save(args, table)


if __name__ == "__main__":
    main()
