"""What it costs and saves to recompute blocks, as a whole and but for what has a name.

    OMP_NUM_THREADS=1 python benchmarks/remat.py
    OMP_NUM_THREADS=1 python benchmarks/remat.py --names attended gate up
    OMP_NUM_THREADS=1 python benchmarks/remat.py --count      # without times

The GPT of benchmarks/step.py on one rank: 6 blocks of width 512 over bytes, 4 sequences of 128, float32, AdamW. One
line each for a step that keeps all activations, one that recomputes the blocks, and ones that keep some values by name:

    FLOPs       of matrix products and attention that are recomputed, in percent of those of a step that keeps all
    bytes       of activations that lie between the forward run and the pullback, in percent of those of a step that
                keeps all; with the logits and what else lies outside of blocks
    ms          the median time of a step, and of one that keeps all: the medians of the ratios within each round
    expected    that ratio, had every FLOP the same price and nothing else one

All must give the same losses, to the bit, or the run fails.
"""

from __future__ import annotations

import gc
import random
import statistics
import time

import results
import torch
from contenders import Setup, Training, fzero_step

import fzero as fz
from fzero.base.operators import Flops

CHOICES = (("attended", "gate", "up"), ("qkv", "attended"), ("attended",))


def remats(chosen: tuple[tuple[str, ...], ...]) -> dict[str, Training]:
    setup = Setup()
    steps = {"all kept": fzero_step(lambda step: step), "recomputed": fzero_step(fz.remat)}
    for names in chosen:
        steps[" ".join(names)] = fzero_step(lambda step, names=names: fz.remat(step, "blocks.*", save=names))
    made = {name: make(setup) for name, make in steps.items()}
    return {name: run for name, run in made.items() if isinstance(run, Training)}


def flops_and_bytes(run: Training, x: torch.Tensor, y: torch.Tensor) -> tuple[int, int]:
    """FLOPs of a forward run and its pullback, and the bytes that lie between the two."""
    run(x, y)  # the first run looks at the function
    gc.collect()
    with fz.testing.LiveBytes() as live, Flops() as counter:
        loss, pullback = run.step.vjp(run.state, x, y)
        gc.collect()
        between = live.now()
        pullback(torch.ones_like(loss))
    return counter.total, between


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--names", nargs="*", help="to keep, in the place of some choices")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="in a row, in each round")
    parser.add_argument("--count", action="store_true", help="count, and measure no time")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(0, 256, (2, 4, 128), generator=generator)
    runs = remats((tuple(options.names),) if options.names else CHOICES)
    counted = {name: flops_and_bytes(run, x, y) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    losses: dict[str, list[float]] = {name: [] for name in runs}
    draw = random.Random(0)
    for _ in range(1 if options.count else options.rounds):
        for name in draw.sample(list(runs), len(runs)):
            began = time.perf_counter()
            losses[name] += [runs[name](x, y).item() for _ in range(options.steps)]
            times[name].append((time.perf_counter() - began) / options.steps * 1e3)
    flops, kept = counted["all kept"]
    table = results.Table("FLOPs again, %", "bytes kept, %", "median ms", "of all kept", "expected")
    print(f"{torch.backends.cpu.get_cpu_capability()}; all kept: {flops / 1e9:.1f} GFLOP a step, {kept / 1e6:.1f} MB")
    for name in runs:
        assert losses[name] == losses["all kept"], f"{name}: other losses"
        ratio = statistics.median(own / base for own, base in zip(times[name], times["all kept"], strict=True))
        again, between = (counted[name][0] - flops) / flops, counted[name][1] / kept
        took = (None, None) if options.count else (statistics.median(times[name]), ratio)
        table.row(name, 100 * again, 100 * between, *took, 1 + again)
    results.save(options, table)


if __name__ == "__main__":
    main()
