"""How long one node of a step's graph takes, forward and back, by torch's own `apply` and by `direct`.

    OMP_NUM_THREADS=1 python benchmarks/node.py

A unit is two such nodes: its call, and the gate of its params.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from fzero.base.ambient import Ambient
from fzero.base.node import Node, Op, Tensors, apply

NODES = 50


class AddOne(Op):
    def run(self, tensors: Tensors, wanted: Sequence[int]) -> Tensors:
        return self.fn(*tensors)

    def back(
        self, tensors: Callable[[], Tensors], wanted: Sequence[int], cotangents: Sequence[torch.Tensor | None]
    ) -> dict[int, torch.Tensor]:
        (cotangent,) = cotangents
        assert cotangent is not None
        return {0: cotangent}


def seconds(applied: Callable[..., Tensors]) -> float:
    """The CPU time of one node."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(NODES):
            (x,) = applied(AddOne(lambda y: (y + 1,), None, Ambient("cpu")), [0], x)
        return x

    begun, x = time.process_time(), torch.ones(8, requires_grad=True)
    out = chain(x)
    torch.autograd.grad(out, x, torch.ones_like(out))
    return (time.process_time() - begun) / NODES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="default 60")
    args = parser.parse_args()
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {"torch's apply": [], "direct": []}
    for _ in range(args.rounds):
        for name, applied in (("torch's apply", Node.apply), ("direct", apply)):
            times[name].append(seconds(applied))
    for name, found in times.items():
        print(f"{name:<14} {1e3 * statistics.median(found):.3f} ms a node, least {1e3 * min(found):.3f}")


if __name__ == "__main__":
    main()
