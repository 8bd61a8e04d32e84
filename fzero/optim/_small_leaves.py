"""The params and grads by which an optimizer of a user's own is tried, leaf by leaf and in buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

# what multiplies grads of norm one, leaves by turns, in each update: a sign, and a power of 30. Bounds on a norm lie
# between two leaves'; some grow or turn as others do not, and last so do the halves of a leaf
_TURNS = (
    ((1, 0), (1, 1), (1, -1), (1, -2), (1, -3), (1, 0), (-1, 1), (1, 0), (-1, 1)),
    ((1, 0), (1, 1), (1, -1), (1, -2), (1, -3), (-1, 1), (-1, 0), (-1, 1), (1, 0)),
)
_BY_HALVES = 7  # updates before those in which the second half of a leaf is multiplied as others' first one


_SIZES = (1.0, 30.0, 0.1)  # of grads that have the same size in all leaves' elements


def small_leaves(
    shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> list[list[list[torch.Tensor]]]:
    """The params and the grads of each update, some times.

    First with all sizes alike; then so that the first grads are zero but at the end of the first leaf, and those of the
    second one are zero in every update; then by turns.
    """
    made = torch.Generator(device="cpu").manual_seed(0)
    alike, some, turns = [[[] for _ in range(count + 1)] for count in (len(_SIZES), len(_SIZES), len(_TURNS[0]))]
    for place, shape in enumerate(shapes):
        drawn = torch.randn((len(turns) + 1, *shape), generator=made, dtype=dtype, device="cpu") * 30.0**place
        for out in (alike, some, turns):
            out[0].append(drawn[0].to(device))
        towards = drawn[-1]
        for number, noise in enumerate(drawn[1:-1]):
            if number < len(_SIZES):
                x = noise * _SIZES[number]
                alike[number + 1].append(x.to(device))
                x = x.clone()
                if number == 0 or place == 1:
                    x.reshape(-1)[: -5 if place == 0 else None] = 0.0
                some[number + 1].append(x.to(device))
            x = (towards + noise) / math.sqrt(max(noise.numel(), 1))
            x.reshape(-1).mul_(_factors(place, number, x.numel(), dtype))
            turns[number + 1].append(x.to(device))
    return [alike, some, turns]


def not_finite(given: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """The params and two updates' grads, the last of which is not finite in the first element of the first leaf."""
    out = [list(each) for each in given[:3]]
    out[-1][0] = broken = out[-1][0].clone()
    broken.reshape(-1)[:1] = math.nan
    return out


def _factors(place: int, number: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """What multiplies the elements of a leaf's grad in an update."""
    own, other = [sign * 30.0**power for sign, power in (_TURNS[(place + i) % 2][number] for i in (0, 1))]
    made = torch.full((count,), own, dtype=dtype, device="cpu")
    if number >= _BY_HALVES:
        made[count // 2 :] = other
    return made
