"""Norms leaf by leaf, over all shards: of params, grads, updates and moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from fzero.base import pytree
from fzero.base.follow import root
from fzero.state.sharded import Sharded, is_sharded
from fzero.state.squares import LeafSquares, over_ranks, squares_of

Norms = dict[str, torch.Tensor]  # path of a leaf -> 0-d float64


class Squares(NamedTuple):
    """The sums of squares of this rank's parts of a tree's leaves, float64[leaves]."""

    name: str
    leaves: Sequence[int]
    sums: torch.Tensor


def norms_by_leaf(tree: Sharded) -> Norms:
    """Leaf path -> the norm of the leaf's decoded values over all shards."""
    squares = squares_of(tree)
    return _named(sorted(squares), root(over_ranks(squares, tree)), tree)


def _named(leaves: Sequence[int], norms: torch.Tensor, like: Sharded) -> Norms:
    return {like.layout.rows[leaf].path: norm for leaf, norm in zip(leaves, norms.unbind(), strict=True)}


def moments_by_name(moments: object) -> dict[str, list[Sharded]]:
    """The trees among an optimizer's moments by their names, such as "mu" and "nu": those of all its parts.

    Where two of them have a leaf in common, as members of a chain may, a name begins with the member's.
    """
    names, leaves, _ = pytree.named_leaves(moments, is_leaf=is_sharded)
    out: dict[str, list[Sharded]] = {}
    for name, tree in zip(names, leaves, strict=True):
        if is_sharded(tree):
            short = name.rpartition(".")[2]
            met = {key for other in out.get(short, ()) for key in other.groups}
            out.setdefault(name if met & set(tree.groups) else short, []).append(tree)
    return out


def moment_norms(moments: object) -> dict[str, Norms]:
    """Name of a moment -> leaf path -> norm."""
    every = moments_by_name(moments).items()
    return {name: {path: x for tree in trees for path, x in norms_by_leaf(tree).items()} for name, trees in every}


def parts_of(name: str, tree: Sharded) -> list[Squares]:
    """The squares of a tree's leaves."""
    squares = squares_of(tree)
    return [named_squares(name, squares)] if squares else []


def named_squares(name: str, squares: Mapping[int, torch.Tensor]) -> Squares:
    """Those of a tree's leaves, which are known."""
    own = LeafSquares.of(squares)
    return Squares(name, [*own.leaves], own.vector)


def norms_of_squares(parts: Sequence[Squares], like: Sharded) -> dict[str, Norms]:
    """Name of a tree -> the norms of its leaves, of this rank's parts of them: one exchange for all.

    Args:
        parts: of the same leaves, in the same order, on all ranks.
    """
    names = [(leaf, part.name) for part in parts for leaf in part.leaves]
    if not names:
        return {}
    order = sorted(range(len(names)), key=lambda place: names[place][0])
    squares = torch.cat([part.sums.reshape(-1).to(like.device) for part in parts])[order]
    norms = root(over_ranks(LeafSquares([names[place][0] for place in order], squares), like))
    out: dict[str, Norms] = {name: {} for _, name in names}
    for place, norm in zip(order, norms.unbind(), strict=True):
        leaf, name = names[place]
        out[name][like.layout.rows[leaf].path] = norm
    return out
