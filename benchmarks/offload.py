"""What it costs to keep state on the host or a disk: time, memory and bytes moved, beside the same step resident.

    OMP_NUM_THREADS=2 python benchmarks/offload.py --folder /mnt/nvme       # a disk; the system's temporary folder else
    OMP_NUM_THREADS=2 python benchmarks/offload.py --unclipped              # nothing waits for the norm
    python benchmarks/offload.py --device cuda --width 2048 --blocks 20 --heads 16 --batch 8 --context 1024

One process, a GPT over bytes, AdamW clipped by the exact norm, every block recomputed, computing in bfloat16 (or in
`--dtype`). On a GPU state goes to the host and nothing to a disk, unless there is a `--folder`. Every contender takes
`--steps` steps in a row, until all that it has started has arrived, in an order drawn anew for each round. Then each
runs alone in a fresh process, where its memory is measured.

One line per contender:

    median       milliseconds of a step
    of resident  that over the same scheme's with all state on the device, the median of the ratios within each round
    of best      that over max(resident, transfers at the bandwidth that was measured in this run): 1.00 hides them all
    read         MB that come to the device in a step (2^20 bytes), as `fz.plan` says, for fzero
    written      MB that leave it
    at rest      MB of live tensor bytes on the device between steps (of the allocator on CUDA; of the process on a CPU)
    at peak      at most within a step

The losses must agree, or the run fails. torchao's CPUOffloadOptimizer does not clip: its losses are its own. Peers that
are not installed, or that need an accelerator, print "not run".
"""

from __future__ import annotations

import statistics
import tempfile

import results
import torch
from contenders import AWAY, OFFLOADED, away, is_here
from step import MB, check_losses, memory, ratio, setup_of, spawned, timed

import fzero as fz


def main() -> None:
    parser = results.parser(__doc__)
    sizes = {"width": 512, "blocks": 12, "heads": 8, "batch": 4, "context": 512, "warmup": 1, "rounds": 5, "steps": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--unclipped", action="store_true", help="updates do not wait for the norm of all gradients")
    parser.add_argument("--folder", help="on a local disk")
    parser.add_argument("--only", nargs="*", default=[], help="words that are in the contenders' names")
    parser.add_argument("--no-memory", action="store_true", help="time only")
    args = parser.parse_args()
    args.ranks, args.remat, args.clipped = 1, True, not args.unclipped
    args.folder = args.folder or ("" if args.device == "cuda" else tempfile.gettempdir() + "/fzero-benchmark")
    chosen = [name for name in OFFLOADED if not args.only or any(word in name for word in (*args.only, "resident"))]
    names = [name for name in chosen if is_here(name, 1)]
    bandwidth = fz.measure_bandwidth(fz.Disk(args.folder) if args.folder else None, args.device)
    print(" ".join(f"{key}={value}" for key, value in vars(args).items() if key not in ("only", "no_memory", "save")))
    print(f"{bandwidth}; {torch.backends.cpu.get_cpu_capability()}", flush=True)
    times, losses = spawned(timed, args, names)
    check_losses({name: own for name, own in losses.items() if "torchao" not in name}, 2e-2)
    head = ("median ms", "of resident", "of best", "MB read", "MB written", "live MB at rest", "live MB at peak")
    table = results.Table(*head)
    for name in chosen:
        if name not in names:
            table.row(name, "not run")
            continue
        scheme = name.partition(",")[0] if name in AWAY else "fp32 masters"
        resident, median = f"{scheme}, resident", statistics.median(times[name])
        best: list[float | None] = [None] * 3
        if name in AWAY:
            plan = fz.plan(*away(setup_of(args), name))
            moved = [sum(of) for of in zip(*plan.moved.values(), strict=True)] or [0, 0]
            seconds = plan.seconds(bandwidth, statistics.median(times[resident]))
            best = [median / seconds, *[count / MB for count in moved]]
        sizes = [] if args.no_memory else [size / MB for size in spawned(memory, args, name)[:2]]
        table.row(name, median * 1e3, ratio(times, name, resident), *best, *sizes)
    results.save(args, table)


if __name__ == "__main__":
    main()
