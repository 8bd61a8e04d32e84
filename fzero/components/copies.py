"""Whether ranks that should have the same value do: where it goes to a place with fewer of them, one's is taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fzero.base import pytree
from fzero.components.routes import Seat

NEAR = 1e-5  # relative: the same computation may be this far apart on other hardware


class Print(NamedTuple):
    """What is compared of a tensor: its shape, the sum of its absolute values, and its sum."""

    shape: tuple[int, ...]
    size: float
    total: float


def prints_of(tree: object) -> list[Print]:
    """Of each tensor of a tree, in one pass over memory for each number."""
    out = []
    for x in pytree.leaves(tree):
        if isinstance(x, torch.Tensor):
            own = pytree.as_reals(x)
            own = own if own.is_floating_point() else own.to(torch.float64)
            size = torch.linalg.vector_norm(own, 1, dtype=torch.float64)
            out.append(Print(tuple(x.shape), float(size), float(own.sum(dtype=torch.float64))))
    return out


Noted = list[tuple[str, list[Print]]]  # what a rank has sent, in words, and what is compared of it


def need_alike(seats: Sequence[Seat], noted: Sequence[Noted]) -> None:
    """Refuses what differs between ranks of a place that have the same examples.

    Args:
        noted: by each rank.
    """
    for rank, seat in enumerate(seats):
        first = next(i for i, other in enumerate(seats) if (other.place, other.data) == (seat.place, seat.data))
        for (what, own), (_, other) in zip(noted[rank], noted[first], strict=True):
            if len(own) != len(other) or not all(_near(a, b) for a, b in zip(own, other, strict=True)):
                raise ValueError(
                    f"pipeline: {what} differs between ranks {first} and {rank} of its group, which have the same "
                    "examples, and it goes to a place with another number of such ranks, where one's alone would be "
                    "taken; expected the same on all. Put the ranks' slices together in the stage (fz.parallel.gather "
                    "or sum; in front of what each computes with its own slice, fz.parallel.copy), or give both places "
                    "as many ranks of the axis that leaves are cut over."
                )


def _near(a: Print, b: Print) -> bool:
    far = NEAR * max(a.size, b.size)
    pairs = (a.size, b.size), (a.total, b.total)
    return a.shape == b.shape and all(
        x == y or abs(x - y) <= far or (math.isnan(x) and math.isnan(y)) for x, y in pairs
    )
