"""What an optimizer of the user's own returns: updates and a state like those that it was given."""

from __future__ import annotations

import torch

from fzero.base.arguments import named
from fzero.state.sharded import Sharded, trees_of
from fzero.table.layout import Key


def need_like(found: object, updates: object, state: object) -> None:
    """Refuses what would be broadcast over buffers, or lose imaginary parts, as it is added to them.

    Args:
        found: what its update has returned of `updates` and `state`, values that are a step's, or any trees.
    """
    if not isinstance(updates, Sharded):
        return
    if not isinstance(found, tuple) or len(found) != 2:
        raise TypeError(
            f"step.update: the optimizer's update returned {named(found)}, expected a pair: updates, state."
        )
    new, after = found
    if not isinstance(new, Sharded) or set(new.groups) != set(updates.groups):
        raise TypeError(
            f"step.update: the optimizer's update returned {named(new)} for updates, expected a tree of the buffers "
            "that it was given: as grads.map(fn), or a tree_map over grads, makes it."
        )
    _need_buffers("the optimizer's update", new, updates)
    trees, given = trees_of(after), trees_of(state)
    for tree, old in zip(trees, given, strict=True) if len(trees) == len(given) else ():
        _need_buffers("the optimizer's next state", tree, old)


def _need_buffers(what: str, new: Sharded, old: Sharded) -> None:
    for key in [key for key in new.groups if key in old.groups]:
        x, own = new.local(key), old.local(key)
        if x.shape != own.shape or (x.is_complex() and not own.is_complex()):
            raise _unlike(what, new, key, x, own)


def _unlike(what: str, tree: Sharded, key: Key, x: torch.Tensor, own: torch.Tensor) -> ValueError:
    leaves = ", ".join(repr(slot.path) for slot in tree.layout.groups[key].slots)
    return ValueError(
        f"step.update: {what} of the buffer of leaf {leaves} is {named(x)}, expected real numbers in the shape that it "
        f"was given, {tuple(own.shape)}: a buffer is this rank's slice of its leaves one behind the other. What looks "
        "at rows, or whole leaves, goes into fz.whole(optimizer), which gives it each leaf in its shape."
    )
