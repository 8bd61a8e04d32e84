"""What the scripts of this folder share: numbers drawn from a seed, a small network, and how they are run.

    python examples/gallery/meanflow.py                          # two ranks, as threads of this process
    python examples/gallery/meanflow.py --ranks 1
    torchrun --nproc-per-node 2 examples/gallery/meanflow.py     # two ranks, as processes

A script has `main(rank, ranks)`, the training on one of several ranks under ZeRO-3, and `plain()`, the same with torch
alone in one process. Both return tensors by name, and the script prints by how much they differ. All are in float64.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fzero as fz


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mlp(seed: int, *sizes: int) -> nn.Sequential:
    """Linear layers with a tanh between any two. Each layer is a unit: its params are gathered for its call."""
    modules: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        layer = nn.Linear(inputs, outputs, device="meta")
        layer.weight = nn.Parameter(normal(seed + number, outputs, inputs) / inputs**0.5)
        layer.bias = nn.Parameter(normal(seed + number + 100, outputs) / 10)
        modules += [layer, nn.Tanh()]
    return nn.Sequential(*modules[:-1])


def compare(main: Callable[[int, int], Mapping[str, Tensor]], plain: Callable[[], Mapping[str, Tensor]]) -> None:
    """Runs both, and prints how far they are apart."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2, help="of `main`; torchrun says its own")
    ranks = parser.parse_args().ranks
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group()
        ranks = dist.get_world_size()
        found = main(dist.get_rank(), ranks)
        first = dist.get_rank() == 0
        dist.destroy_process_group()
        if not first:
            return
    else:
        found = fz.testing.run_ranks(lambda rank: main(rank, ranks), ranks)[0]
    want = plain()
    apart = max((found[name] - leaf).abs().max().item() for name, leaf in want.items())
    largest = max(leaf.abs().max().item() for leaf in want.values())
    print(f"{ranks} rank{'s' * (ranks > 1)} and plain torch: {len(want)} tensors of entries up to {largest:.2g}")
    print(f"the largest difference is {apart:.1e}")
