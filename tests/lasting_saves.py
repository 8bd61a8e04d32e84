"""Saves a small state many times in every way, and says what grew: files, threads, objects, memory, keys of the store.

`make lasting SAVES=10000`: on one rank, and on two that are processes. Exits with 1 where anything did after the first
tenth, resident memory by more than 2 MB.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import sys
import tempfile
import threading

import torch
import torch.distributed as dist
from failing import X, model
from lasting import MOST, resident

import fzero as fz
from fzero.testing import run_ranks

SPARE = 20  # objects: what is cached as it is first seen


def looks(saves: int) -> list[int]:
    """After how many saves one looks."""
    return [max(1, saves * tenth // 10) for tenth in (1, 4, 7, 10)]


def saving(folder: str, saves: int, ranks: int, rank: int) -> list[dict[str, float]]:
    """What there is on a rank after some of the saves: fz.save, fz.save_async and those of fz.Checkpoints in turn."""
    step = fz.train_step(model()[0], fz.chain(fz.clip_by_global_norm(0.5), fz.adamw(1e-2)))
    step = fz.donate(fz.shard_zero3(step) if ranks > 1 else step)
    kept, found = fz.Checkpoints(os.path.join(folder, "run"), keep=3), []
    state = step.init(model()[1])
    for number in range(1, saves + 1):
        extra = {"seen": number}
        if number % 3 == 0:
            under_way = kept.save_async(state, extra)
        elif number % 3 == 1:
            under_way = fz.save_async(os.path.join(folder, "background"), state, extra)
        else:
            fz.save(os.path.join(folder, "once"), state, extra)
            under_way = None
        state, _ = step(state, X)
        if number in looks(saves):
            if under_way is not None:
                under_way.wait()
            del under_way
            for turn in range(ranks):
                if ranks > 1:
                    dist.barrier()  # the last to leave a save has taken its notes away
                if turn == rank:
                    found.append(now(folder))
            if ranks > 1:
                dist.barrier()  # ranks that are threads share what is counted: none goes on while another looks
    return found


def now(folder: str) -> dict[str, float]:
    gc.collect()
    objects = gc.get_objects()
    tensors = [x for x in objects if type(x) is torch.Tensor]
    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    return {
        "files": sum(len(names) for _, _, names in os.walk(folder)),
        "folders": sum(1 for _ in os.walk(folder)),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "objects": len(objects),
        "tensors": len(tensors),
        "MB of tensors": sum(x.untyped_storage().nbytes() for x in tensors) / 2**20,
        "keys": store.num_keys() if store is not None else 0,
        "resident MB": resident(),
    }


def grown(found: list[dict[str, float]]) -> list[str]:
    """What there is more of at the end than at the first look."""
    spare = {"resident MB": MOST, "objects": SPARE}
    return [name for name, first in found[0].items() if found[-1][name] > first + spare.get(name, 0)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=1000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    bad = False
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            job = functools.partial(saving, folder, args.saves, ranks)
            many = lambda: run_ranks(job, ranks, backend="processes", timeout=7200.0, checked=False)
            all_found = many() if ranks > 1 else [job(0)]
        for rank, found in enumerate(all_found):
            for number, seen in zip(looks(args.saves), found, strict=True):
                words = ", ".join(f"{value:.6g} {name}" for name, value in seen.items())
                print(f"rank {rank} of {ranks}, save {number}: {words}", flush=True)
            if more := grown(found):
                print(f"rank {rank} of {ranks}: grown are {', '.join(more)}")
                bad = True
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
