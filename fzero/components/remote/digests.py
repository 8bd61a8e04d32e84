"""Sums by which ranks see that they have the same: of what several ranks have, any one's would be taken.

A digest is the sum of all elements, each taken times a weight of its own: what is in another order, or of another sign,
has another one. Ranks that compute the same have the same bits, but for rounding on processors that differ.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable

import torch

from fzero.base import pytree

Digest = tuple[float, float, float]  # the sum, the norm of the elements, and how near sums must be, relative to it
_WIDTH = 1024  # elements that are summed as a product with one vector


def digest_of(x: torch.Tensor) -> Digest:
    """The digest of a tensor of any dtype and shape."""
    with torch.no_grad():
        x = pytree.as_reals(x.detach())
        near = {8: 1e-10, 4: 1e-5}.get(x.element_size(), 1e-2) if x.is_floating_point() else 0.0
        if x.dtype not in (torch.float32, torch.float64):
            x = x.to(torch.float32 if x.is_floating_point() else torch.float64)
        flat = x.reshape(-1)
        parts, level = flat, 0
        while level == 0 or parts.numel() > 1:
            parts, level = _products(parts, _weights(level, parts.dtype, parts.device)).double(), level + 1
        return float(parts.sum()), float(torch.linalg.vector_norm(flat)), near


def _products(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The products with some weights of each as many elements, and of those that are left."""
    rows = x.numel() // _WIDTH
    body, rest = x[: rows * _WIDTH].view(rows, _WIDTH), x[rows * _WIDTH :]
    return torch.cat([body @ weights, (rest @ weights[: rest.numel()])[None]])


@functools.lru_cache(64)
def _weights(level: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers of both signs from 0.5 to 1, others at each level."""
    places = torch.arange(1, _WIDTH + 1, dtype=torch.float64, device=device) + 5000 * level
    signs = torch.where((places * 2**0.5).frac() < 0.5, -1.0, 1.0)
    return (signs * (0.5 + (places * (5**0.5 / 2)).frac() / 2)).to(dtype)


def apart(digests: Iterable[tuple[Hashable, Digest]]) -> tuple[Hashable, list[float]] | None:
    """The first of what ranks should have alike that they have not, and its sums; None where all is alike."""
    found: dict[Hashable, list[Digest]] = {}
    for name, digest in digests:
        found.setdefault(name, []).append(digest)
    for name, own in found.items():
        first = own[0]
        if not all(is_close(each, first) for each in own[1:]):
            return name, [each[0] for each in own]
    return None


def is_close(one: Digest, other: Digest) -> bool:
    """Tells whether two tensors of one shape are the same but for rounding, by their digests."""
    wild = [not math.isfinite(total) for total, *_ in (one, other)]
    return all(wild) or (not any(wild) and abs(one[0] - other[0]) <= one[2] * max(one[1], other[1]))


def unlike(component: str, what: object, sums: list[float]) -> str:
    """What is said of what ranks should have alike."""
    return (
        f"component {component!r}: {what} differs between ranks that have the same examples, or that return it without "
        f"a dim of theirs: its elements, taken times weights, add up to {sums}; expected the same on all. Put pieces "
        "together in the function (fz.parallel.gather or sum), and give what all of these ranks have, inputs and "
        "params, to a part that is cut over them by fz.parallel.copy; or split batches over these ranks, too, say in "
        "out_specs= that each of them has its own piece, and in fz.shard_tensor which leaves are cut. Return a whole "
        "number or a bool with a dim of examples, or as a floating tensor."
    )
