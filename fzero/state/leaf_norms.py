"""Norms leaf by leaf, over all shards: of params, grads, updates and moments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from fzero.base import pytree
from fzero.base.follow import root
from fzero.state.gather import over_ranks, squares_of
from fzero.state.sharded import Sharded, is_sharded

Norms = dict[str, torch.Tensor]  # path of a leaf -> 0-d float64


def norms_of_squares(squares: Mapping[int, torch.Tensor], like: Sharded) -> Norms:
    """The norm of each leaf, of this rank's `squares_of` a tree, in leaf order."""
    norms = root(over_ranks(squares, like)).unbind() if squares else ()
    return {like.layout.rows[leaf].path: norm for leaf, norm in zip(sorted(squares), norms, strict=True)}


def norms_by_leaf(tree: Sharded) -> Norms:
    """Leaf path -> the norm of the leaf's decoded values over all shards."""
    return norms_of_squares(squares_of(tree), tree)


def named_moments(moments: object) -> Iterable[tuple[str, Sharded]]:
    """The trees among an optimizer's moments, and their names: "mu", "nu"; "0.mu" of a member of a chain."""
    names, leaves, _ = pytree.named_leaves(moments, is_leaf=is_sharded)
    return [(name, leaf) for name, leaf in zip(names, leaves, strict=True) if is_sharded(leaf)]
