"""What the scripts of this folder share: numbers drawn from a seed, a small network, and how they are run.

    python examples/gallery/meanflow.py                          # two ranks, as threads of this process
    python examples/gallery/meanflow.py --ranks 1
    torchrun --nproc-per-node 2 examples/gallery/meanflow.py     # two ranks, as processes

A script has `main(rank, ranks)`, the training on one of several ranks under ZeRO-3, and `plain()`, the same with torch
alone in one process. Both return tensors by name, and the script prints by how much they differ. All are in float64.
"""

from __future__ import annotations

import argparse
import functools
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
    layers = [nn.utils.skip_init(nn.Linear, a, b, dtype=torch.float64) for a, b in itertools.pairwise(sizes)]
    for number, layer in enumerate(layers):
        layer.weight.data = normal(seed + number, *layer.weight.shape) / layer.in_features**0.5
        layer.bias.data = normal(seed + number + 100, *layer.bias.shape) / 10
    return nn.Sequential(*[module for layer in layers for module in (layer, nn.Tanh())][:-1])


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
        found = fz.testing.run_ranks(functools.partial(main, ranks=ranks), ranks)[0]
    want = plain()
    apart = max((found[name] - leaf).abs().max().item() for name, leaf in want.items())
    largest = max(leaf.abs().max().item() for leaf in want.values())
    print(f"{ranks} rank{'s' * (ranks > 1)} and plain torch: {len(want)} tensors of entries up to {largest:.2g}")
    print(f"the largest difference is {apart:.1e}")
