"""Norms of leaves, and trees times a number for each leaf; on any pytree, and over all shards of a step's trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fzero.base import pytree
from fzero.base.follow import root
from fzero.state.replicated_to_sharded import leaf_values_to_sharded
from fzero.state.sharded import Sharded
from fzero.state.squares import over_ranks, squares_of


def norms_of(tree: object) -> list[torch.Tensor]:
    """The norm of each leaf, over all its shards, in order: 0-d float64 tensors."""
    if isinstance(tree, Sharded):
        return [root(x) for x in over_ranks(squares_of(tree), tree).unbind()]
    return [root(leaf.to(torch.float64).square().sum()) for leaf in pytree.leaves(tree)]


def multiplied(tree: object, factors: Sequence[torch.Tensor]) -> object:
    """A tree, each leaf times its factor, a 0-d tensor."""
    if not isinstance(tree, Sharded):
        leaves, spec = pytree.flatten(tree)
        return pytree.unflatten(spec, [x * f.to(x.device, x.dtype) for x, f in zip(leaves, factors, strict=True)])
    numbers = sorted(slot.leaf for key in tree.groups for slot in tree.layout.groups[key].slots)
    each = leaf_values_to_sharded(tree, dict(zip(numbers, factors, strict=True)))
    own = {key: tree.local(key) for key in tree.groups}
    return tree.with_buffers({key: x * each[key].to(x.device, x.dtype) for key, x in own.items()})
