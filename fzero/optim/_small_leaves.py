"""The params and grads by which an optimizer of a user's own is tried, leaf by leaf and in buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

# what multiplies grads, leaves by turns, in each update: a sign, and a power of 30. Every bound on a norm lies between
# two leaves'; some grow or turn as others do not, and last so do the halves of a leaf
_TURNS = (
    ((1, 0), (1, 1), (1, -1), (1, -2), (1, -3), (1, 0), (-1, 1), (1, 0), (-1, 1)),
    ((1, 0), (1, 1), (1, -1), (1, -2), (1, -3), (-1, 1), (-1, 0), (-1, 1), (1, 0)),
)
_BY_HALVES = 7  # updates before those in which the second half of a leaf is multiplied as others' first one


def small_leaves(
    shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device, some: bool
) -> list[list[torch.Tensor]]:
    """The params, and the grads of each update.

    Args:
        some: the first grads are zero but at the end of the first leaf, and those of the second one are zero in every
            update.
    """
    made = torch.Generator(device="cpu").manual_seed(0)
    out: list[list[torch.Tensor]] = [[] for _ in range(len(_TURNS[0]) + 1)]
    for place, shape in enumerate(shapes):
        drawn = torch.randn((len(out) + 1, *shape), generator=made, dtype=dtype, device="cpu") * 30.0**place
        p, towards, *noise = drawn
        out[0].append(p.to(device))
        for number, own in enumerate(out[1:]):
            x = (towards + noise[number]) / math.sqrt(max(p.numel(), 1))
            x.reshape(-1).mul_(_factors(place, number, x.numel(), dtype))
            if some and (number == 0 or place == 1):
                x.reshape(-1)[: -5 if place == 0 else None] = 0.0
            own.append(x.to(device))
    return out


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
