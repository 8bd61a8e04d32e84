"""How much a process grows while its whole state lies on a disk: three steps of ZeRO-3 on two ranks.

    OMP_NUM_THREADS=1 python benchmarks/resident.py [FOLDER]

16 transformer blocks; params, gradients and moments are on a `fz.Disk`, units run again in the pullback (`fz.remat`),
and the state is donated. A line for each step: how far a rank's resident memory has risen since before the first, and
that over the bytes of its params and moments. Of memory that ranks share, each has its part (`Pss` of the kernel).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import results
import torch
import torch.nn.functional as F
from step import spawned
from transformer import Transformer

import fzero as fz

MIB = 1 << 20


def resident() -> int:
    """Bytes of this process's memory that lie in RAM."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def measured(rank: int, args: argparse.Namespace, folder: str) -> tuple[int, list[int]]:
    """Bytes of a rank's params and moments, and those that it has grown by after each step."""
    generator = torch.Generator().manual_seed(0)
    apply, params = fz.functional(Transformer(args.width, args.blocks, args.heads, generator))
    step = fz.train_step(lambda p, x, y: F.cross_entropy(apply(p, x).mT, y), fz.adamw(1e-3))
    disk = fz.Disk(os.path.join(folder, str(rank)))
    step = fz.donate(fz.remat(fz.offload(fz.shard_zero3(step), params=disk, grads=disk, moments=disk)))
    size = 3 * sum(x.nbytes for x in params.values()) // args.ranks
    state = step.init(params)
    del params
    tokens = torch.randint(0, 256, (args.batch, args.context + 1), generator=generator)
    before, grown = resident(), []
    for _ in range(args.steps):
        state, metrics = step(state, tokens[:, :-1], tokens[:, 1:])
        metrics["loss"].item()
        grown.append(resident() - before)
    return size, grown


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("folder", nargs="?", default=tempfile.gettempdir())
    sizes = {"width": 512, "blocks": 16, "heads": 8, "batch": 2, "context": 128, "steps": 3, "ranks": 2}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    args.device = "cpu"
    table = results.Table("MiB more", "of params and moments")
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        size, grown = spawned(measured, args, scratch)
    for number, more in enumerate(grown, 1):
        table.row(f"after step {number}", more / MIB, more / size)
    results.save(args, table)


if __name__ == "__main__":
    main()
