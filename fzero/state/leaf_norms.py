"""Norms leaf by leaf, over all shards: of params, grads, updates and moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fzero.base import pytree
from fzero.base.follow import root
from fzero.state.gather import over_ranks, squares_of
from fzero.state.sharded import Sharded, is_sharded

Norms = dict[str, torch.Tensor]  # path of a leaf -> 0-d float64
Squares = Mapping[int, torch.Tensor]  # leaf -> the sum of squares of this rank's part, 0-d float64


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


def norms_of_squares(found: Mapping[str, Squares], like: Sharded) -> dict[str, Norms]:
    """The norms of leaves, of this rank's sums of squares of several trees: one exchange for all of them.

    Args:
        found: name of a tree -> its squares; of the same leaves on all ranks.
    """
    if like.axis.tensor is not None:
        return {name: _named(sorted(own), root(over_ranks(own, like)), like) for name, own in found.items()}
    device = like.device
    every = [(name, leaf) for name, own in found.items() for leaf in sorted(own)]
    if not every:
        return {name: {} for name in found}
    squares = torch.stack([found[name][leaf].to(device) for name, leaf in every])
    cut = [place for place, (_, leaf) in enumerate(every) if like.layout.rows[leaf].cuts]
    if cut:
        squares[cut] = like.axis.sum(squares[cut], "leaf_norms")
    out: dict[str, Norms] = {name: {} for name in found}
    for (name, leaf), norm in zip(every, squares.sqrt().unbind(), strict=True):
        out[name][like.layout.rows[leaf].path] = norm
    return out
