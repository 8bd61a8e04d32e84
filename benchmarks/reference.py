"""Memory of one rank of the reference's model, counted over a real step on fake tensors: nothing is computed.

    python benchmarks/reference.py            # some minutes
    python benchmarks/reference.py --check    # counted beside measured, on a model that really runs here

The model is that of DeepSpeed's low-precision example (DeepSpeedExamples, training/bf16_master_weight): a post-LN
encoder of 32 layers of width 4,096 with 32 heads, vocabulary 50,257, sequences of 512, batch 1; 6,858,007,633 params.
ZeRO-3 over 4 ranks, every layer rematerialised; embedding and head are units of their own. The first lines are what it
publishes.

Prints, per rank, GiB of live tensor bytes between steps and at most within one.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import results
from contenders import MASTERS
from step import spawned

import fzero as fz

GIB = 1 << 30
PUBLISHED = {"DeepSpeed, fp32 masters": (25.74, 31.38), "DeepSpeed, low precision": (16.17, 18.93)}
Transform = Callable[[fz.Step], fz.Step]


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, width: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]


class Encoder(nn.Module):
    """torch's post-LN encoder layers between an embedding and a head."""

    def __init__(self, width: int, layers: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.embed = Embedding(vocabulary, width, context)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


CLIPPED = fz.clip_by_global_norm(1.0)


def schemes() -> dict[str, tuple[fz.Policy, Transform, bool]]:
    """Policy, transform, whether it clips by the global norm."""
    return {
        "fp32 masters": (MASTERS, lambda step: step, True),
        "exact, fp32 moments, fused": (fz.Policy.exact(torch.float32), fz.fuse_update, False),
        "exact, fused and clipped": (fz.Policy.exact(), fz.fuse_update, True),
        "compact24, fused and clipped": (fz.Policy.compact24(), fz.fuse_update, True),
        "compact16": (fz.Policy.compact16(), lambda step: step, True),
        "compact16, fused": (fz.Policy.compact16(), fz.fuse_update, False),
        "compact16, 4-bit, fused": (fz.Policy.compact16("4-bit"), fz.fuse_update, False),
    }


def live_bytes(sizes: dict[str, int], name: str) -> tuple[int, int, int]:
    """Params, live bytes at rest and at peak of one rank."""
    policy, transform, clips = schemes()[name]
    module = Encoder(**sizes)
    apply, params = fz.functional(module)
    count = sum(leaf.numel() for leaf in params.values())

    def loss(p: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(apply(p, tokens).flatten(0, 1), targets.flatten())

    optimizer = fz.adamw(1e-4, weight_decay=0.0)
    optimizer = fz.chain(CLIPPED, optimizer) if clips else optimizer
    step = fz.train_step(loss, optimizer, policy, units=("layers.*", "embed", "head"))
    step = transform(fz.donate(fz.remat(fz.shard_zero3(step))))
    live = fz.testing.LiveBytes()
    with live:
        state = step.init(params, sync=True)
        del params, module
        data = torch.zeros(1, sizes["context"], dtype=torch.int64)
        for _ in range(2):  # the second knows the order of the units
            live.reset_peak()
            state, metrics = step(state, data, data)
            del metrics
        rest = live.now()
    assert state.step == 2
    return count, rest, live.peak


@contextlib.contextmanager
def one_of(ranks: int) -> Any:
    """Rank 0 of a process group whose other ranks are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def counted(sizes: dict[str, int], name: str, ranks: int) -> tuple[int, int, int]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with warnings.catch_warnings(), one_of(ranks), FakeTensorMode():
        warnings.simplefilter("ignore")
        return live_bytes(sizes, name)


def measured(rank: int, args: argparse.Namespace, what: tuple[dict[str, int], str]) -> tuple[int, int, int]:
    return live_bytes(*what)


def check(ranks: int) -> results.Table:
    """Counted on fake tensors beside measured on real ones."""
    sizes = {"width": 256, "layers": 6, "heads": 4, "vocabulary": 1000, "context": 64}
    args = argparse.Namespace(ranks=ranks, device="cpu")
    kinds = [f"{how} MB at {when}" for how in ("counted", "measured") for when in ("rest", "peak")]
    table = results.Table(*kinds, "apart, %")
    for name in schemes():
        ours = counted(sizes, name, ranks)[1:]
        real = spawned(measured, args, (sizes, name))[1:]
        gap = max(abs(a - b) / b for a, b in zip(ours, real, strict=True))
        table.row(name, *[n / 2**20 for n in (*ours, *real)], 100 * gap)
    return table


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--check", action="store_true", help="count and measure a small model")
    parser.add_argument("--ranks", type=int, help="default 4, to check 2")
    parser.add_argument("--only", nargs="*", choices=schemes(), default=list(schemes()))
    args = parser.parse_args()
    if args.check:
        results.save(args, check(args.ranks or 2))
        return
    args.ranks = args.ranks or 4
    sizes = {"width": 4096, "layers": 32, "heads": 32, "vocabulary": 50257, "context": 512}
    table = results.Table("GiB a rank at rest", "GiB a rank at peak", "bytes/param")
    for name, sizes_said in PUBLISHED.items():
        table.row(name, *sizes_said)
    for name in args.only:
        count, rest, peak = counted(sizes, name, args.ranks)
        each = rest / (count / args.ranks)
        table.row(name, rest / GIB, peak / GIB, each)
    results.save(args, table)


if __name__ == "__main__":
    main()
