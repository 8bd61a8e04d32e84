"""What a step needs beside its state, by the length of its sequences and the number of ranks that share them.

OMP_NUM_THREADS=1 python benchmarks/axes.py --lengths    # some minutes; draws benchmarks/activations.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import results
import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
from contenders import ADAMW, loss_of
from llama import Llama, Sizes, rotary
from step import MB, batches, spawned

import fzero as fz

SIZES = Sizes(width=64, blocks=2, heads=4, kv_heads=4, vocabulary=256)
VOCABULARY, FEATURES = 32768, 64  # of the logits
Bytes = list[int]  # for each length


def made_by(fn: Callable[[], object]) -> int:
    """Bytes of tensors that a call makes at most."""
    with fz.testing.LiveBytes() as live:
        fn()
    return live.peak


def activations(rank: int, args: argparse.Namespace, lengths: list[int]) -> Bytes:
    """Of a forward and its pullback under ZeRO-3, with the sequence and the state cut over the ranks."""
    mesh = dist.init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("sp",))
    ax = fz.parallel.axis(mesh, "sp")
    apply, params = fz.functional(Llama(SIZES, fz.parallel.ulysses(None, ax, is_causal=True)))
    step = fz.train_step(lambda p, x, y, angles: loss_of(apply(p, x, angles), y), ADAMW)
    step = fz.shard_zero3(step, mesh=mesh, axis=("sp",))
    state = step.init(params)
    found = []
    for length in [lengths[0], *lengths]:  # a first run looks at the function, and keeps more
        data = batches(argparse.Namespace(batch=1, context=length, device="cpu"), 0, SIZES.vocabulary)
        whole = (*next(data), rotary(SIZES, torch.arange(length))[None])
        x, y, angles = [each.chunk(args.ranks, 1)[rank].contiguous() for each in whole]

        def pulled() -> object:
            loss, pull = step.vjp(state, x, y, angles[0])
            return pull(torch.ones_like(loss))

        found.append(made_by(pulled))
    return found[1:]


def logits(rank: int, args: argparse.Namespace, lengths: list[int]) -> Bytes:
    """Of a head and its loss and their pullback, with the vocabulary cut over the ranks."""
    ax = fz.parallel.axis(dist.init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("tp",)), "tp")
    slices = [VOCABULARY // args.ranks] * args.ranks
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(slices[0], FEATURES, generator=generator) / FEATURES**0.5

    def loss(head: torch.Tensor, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        own = F.linear(fz.parallel.copy(hidden, ax), head)
        return fz.parallel.cross_entropy(own, targets, ax, sizes=slices)

    found = []
    for length in lengths:
        hidden = torch.randn(length, FEATURES, generator=generator)
        targets = torch.randint(0, VOCABULARY, (length,), generator=generator)
        found.append(made_by(lambda: torch.func.grad(loss, argnums=(0, 1))(head, hidden, targets)))
    return found


def both(rank: int, args: argparse.Namespace, lengths: tuple[list[int], list[int]]) -> tuple[Bytes, Bytes]:
    return activations(rank, args, lengths[0]), logits(rank, args, lengths[1])


def powers(first: int, last: int) -> list[int]:
    first = min(first, last)
    return [first << power for power in range((last // first).bit_length())]


def draw(out: Path, longest: int, degrees: list[int]) -> list[results.Table]:
    """Both over lengths, for each number of ranks, beside those of the first one divided by it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    lengths = powers(1024, longest), powers(256, longest // 4)
    found = {ranks: spawned(both, argparse.Namespace(ranks=ranks, device="cpu"), lengths) for ranks in degrees}
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    tables, titles = [], ("activations", f"logits over {VOCABULARY:,} words, with their loss")
    for kind, (axis, title, tokens, panel) in enumerate(zip(("sp", "tp"), titles, lengths, panels, strict=True)):
        tables.append(results.Table(*[f"{length:,} tokens" for length in tokens], title=f"{title}: MB a rank"))
        for ranks in degrees:
            own, ideal = found[ranks][kind], [size * degrees[0] / ranks for size in found[degrees[0]][kind]]
            tables[-1].row(f"{axis}={ranks}", *[size / MB for size in own])
            shares = [size / best for size, best in zip(own, ideal, strict=True)]
            tables[-1].row(f"{axis}={ranks}, of ideal", *shares)
            (line,) = panel.plot(tokens, [size / MB for size in own], "o-", label=f"{axis} = {ranks}")
            panel.plot(tokens, [size / MB for size in ideal], "--", color=line.get_color(), alpha=0.6)
        panel.plot([], [], "--", color="grey", label=f"ideal: as 1 / {axis}")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.set_xticks(tokens)
        for each in (panel.xaxis, panel.yaxis):
            each.set_major_formatter(ScalarFormatter())
            each.set_minor_formatter(NullFormatter())
        panel.set(title=title, xlabel="tokens of the sequence", ylabel="MB of live tensors at peak, a rank")
        panel.grid(alpha=0.3)
        panel.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    print(f"wrote {out}")
    return tables
