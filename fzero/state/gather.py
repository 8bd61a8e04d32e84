"""fz.gather: the natural tree of full tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fzero.base import private, pytree
from fzero.base.arguments import named
from fzero.comm.linear import Wire
from fzero.state.constants import constants
from fzero.state.sharded import Sharded, is_sharded
from fzero.state.train_state import TrainState
from fzero.table.layout import Key


def gather(tree: object) -> Any:
    """The natural tree of full tensors, on every rank: decoded values (grads without their loss scale).

    Where plain autograd follows the buffers, as it does those of a pullback with `create_graph=True`, it follows the
    full tensors too: what every rank computes from them counts as a mean over ranks, like a loss.

    Args:
        tree: `state.params`, grads, `state.moments` or any pytree that holds such trees. Frozen leaves have no
            grads and no moments: `None` stands in their place.

    Returns:
        A tree of the structure given to `init`, of new tensors of each leaf's full shape.

    Example:
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
        >>> fz.gather(step.init({"w": torch.ones(3)}).params)["w"]
        tensor([1., 1., 1.])
    """
    _need_trees(tree)
    tree = constants("fz.gather", "tree", tree)
    with private.below_transforms():
        return pytree.map(lambda node: _gather_one(node) if is_sharded(node) else node, tree, is_leaf=is_sharded)


def _nodes(tree: object) -> Sequence[object]:
    """The leaves of a pytree, states and sharded trees whole."""
    return pytree.flatten(tree, is_leaf=lambda node: is_sharded(node) or isinstance(node, TrainState))[0]


def _need_trees(tree: object) -> None:
    """Refuses what holds no sharded tree: a state, and slices that have forgotten what they are slices of."""
    expected = "expected state.params, grads, state.moments, or a pytree that holds such trees"
    nodes = _nodes(tree)
    if any(isinstance(node, TrainState) for node in nodes):
        raise TypeError(f"gather: got tree={named(tree)}, which holds a whole state; {expected}.")
    if tree is None or (any(n is not None for n in nodes) and not any(is_sharded(node) for node in nodes)):
        raise TypeError(f"gather: got tree={named(tree)}, in which no tree is sharded; {expected}.")


def _gather_one(tree: Sharded) -> object:
    leaves: list[Any] = [None] * len(tree.layout.rows)
    for key in tree.keys:
        full = _gathered(tree, key)
        for index, view in tree.layout.groups[key].views(full).items():
            leaves[index] = view / tree.scale if tree.scale != 1.0 else view.clone()
    return pytree.unflatten(tree.structure, leaves)


def _gathered(tree: Sharded, key: Key) -> torch.Tensor:
    """A group's full buffer; a differentiable function of its shards where plain autograd follows them."""
    own, axis, tag = tree.local(key), tree.axis_of(key), f"gather of {key}"
    if not (own.requires_grad and torch.is_grad_enabled()):
        return axis.gather(own, tag)
    return Wire(tag, axis, own.dtype, own.dtype, own.dtype).spread(own)
