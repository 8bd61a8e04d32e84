"""Attention over a sequence that is cut over ranks: time and memory of a forward and its pullback, beside DeepSpeed's.

    OMP_NUM_THREADS=1 python benchmarks/attention.py
    OMP_NUM_THREADS=1 python benchmarks/attention.py --ranks 4 --causal --kv-heads 2

Ranks are processes that talk over gloo. All contenders get the same tensors, their outputs and gradients are compared
first, and they take turns. DeepSpeed's `DistributedAttention` takes part where deepspeed is installed (extra `bench`);
why it does not is printed otherwise.

Prints milliseconds (the median over rounds of the slowest rank) and, of one more run, MiB of live tensors at most
beside inputs, output and gradients: those that the forward leaves behind for the pullback count.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
import results
from step import spawned

import fzero as fz
from fzero.testing import LiveBytes

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
MIB = 1 << 20
FIRST = "ulysses"
DEEPSPEED = "DeepSpeed DistributedAttention"


def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def deepspeeds(causal: bool) -> Attend:
    """DeepSpeed's Ulysses around torch's attention; it wants [b, tokens, heads, d]."""
    import deepspeed  # type: ignore[import-not-found]
    from deepspeed.sequence.layer import DistributedAttention  # type: ignore[import-not-found]

    deepspeed.init_distributed("gloo", dist_init_required=False)

    def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torchs(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal).transpose(1, 2)

    made: Any = DistributedAttention  # which says that it takes a module, and calls it only
    layer = made(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return layer(*[x.transpose(1, 2).contiguous() for x in (q, k, v)], 0).transpose(1, 2)

    return attend


def contenders(arguments: argparse.Namespace) -> dict[str, Attend | str]:
    """The attention functions; a text says why one does not take part."""
    ax, causal = fz.parallel.axis(None, "sp"), arguments.causal
    found: dict[str, Attend | str] = {FIRST: fz.parallel.ulysses(None, ax, causal=causal)}
    found[f"ulysses, chunks={arguments.chunks}"] = fz.parallel.ulysses(None, ax, arguments.chunks, causal=causal)
    found["ulysses around torch's attention"] = fz.parallel.ulysses(functools.partial(torchs, causal=causal), ax)
    found["ring"] = fz.parallel.ring(ax, causal=causal)
    if causal:
        found["ring, zigzag (of another cut)"] = fz.parallel.ring(ax, "zigzag", causal=True)
    try:
        found[DEEPSPEED] = deepspeeds(causal)
    except Exception as error:  # whatever its import does on a machine without its accelerators
        found[DEEPSPEED] = f"{type(error).__name__}: {error}"
    return found


def once(attend: Attend, inputs: list[torch.Tensor], cotangent: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def peak(attend: Attend, inputs: list[torch.Tensor], cotangent: torch.Tensor) -> int:
    """Bytes at most beside inputs, output and gradients."""
    with LiveBytes() as live:
        out = once(attend, inputs, cotangent)
    return live.peak - sum([x.nbytes for x in out])


def measure(rank: int, arguments: argparse.Namespace, _: object) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(rank)
    own = arguments.length // arguments.ranks
    heads = (arguments.heads, arguments.kv_heads, arguments.kv_heads, arguments.heads)
    *inputs, cotangent = [torch.randn(1, count, own, arguments.d, generator=generator) for count in heads]
    found = contenders(arguments)
    expected, times = once(found[FIRST], inputs, cotangent), {}  # type: ignore[arg-type]
    for name, attend in list(found.items()):
        if isinstance(attend, str):
            continue
        try:
            got = once(attend, inputs, cotangent)
        except Exception as error:  # a peer that does not run such shapes, on all ranks alike
            if name != DEEPSPEED:
                raise
            found[name] = f"{type(error).__name__}: {error}"
            continue
        if "zigzag" not in name:
            for x, y in zip(got, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4, msg=lambda text: f"{name}: {text}")
        times[name] = []
    for _ in range(arguments.rounds):
        for name, each in times.items():
            dist.barrier()
            begin = time.perf_counter()
            once(found[name], inputs, cotangent)  # type: ignore[arg-type]
            slowest = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            each.append(slowest.item())
    peaks = {name: peak(found[name], inputs, cotangent) for name in times}  # type: ignore[arg-type]
    if rank:
        return
    print("outputs and gradients agree")
    table = results.Table("median ms", f"of {FIRST}", f"of {DEEPSPEED}", "MiB", f"MiB of {FIRST}")
    for name, attend in found.items():
        if isinstance(attend, str):
            table.row(name, f"does not take part: {attend.splitlines()[0]}")
            continue
        # contenders of one round met the same load of the machine
        ratios = [
            statistics.median([own / first for own, first in zip(times[name], times[other], strict=True)])
            if other in times
            else None
            for other in (FIRST, DEEPSPEED)
        ]
        sizes = peaks[name] / MIB, peaks[name] / peaks[FIRST]
        table.row(name, 1e3 * statistics.median(times[name]), *ratios, *sizes)
    results.save(arguments, table)


def main() -> None:
    parser = results.parser(__doc__)
    for name, default in (("ranks", 2), ("length", 4096), ("heads", 32), ("d", 64), ("chunks", 16), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kv-heads", type=int, help="as many as heads by default")
    parser.add_argument("--causal", action="store_true")
    arguments = parser.parse_args(namespace=argparse.Namespace(device="cpu"))
    arguments.kv_heads = arguments.kv_heads or arguments.heads
    print(
        f"{arguments.ranks} gloo ranks, {arguments.length} tokens, {arguments.heads} heads of {arguments.d}, "
        f"{arguments.kv_heads} KV heads, float32{', causal' if arguments.causal else ''}"
    )
    spawned(measure, arguments, None)


if __name__ == "__main__":
    main()
