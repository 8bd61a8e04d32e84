"""What an optimizer of the user's own returns: updates and a state like those that it was given."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fzero.base import private
from fzero.base.arguments import named
from fzero.state.moments import need_dtype
from fzero.state.sharded import Sharded, map_trees, trees_of


def returned(found: object, updates: object, state: object) -> tuple[object, object]:
    """What its update has made, with zeros between leaves, where formats that share exponents would mind other values.

    Refuses what would be broadcast over buffers, or lose imaginary parts, as it is added to them.

    Args:
        found: what its update has returned of `updates` and `state`, values that are a step's, or any trees.
    """
    if not isinstance(updates, Sharded):
        return found  # type: ignore[return-value]
    if not isinstance(found, tuple) or len(found) != 2:
        raise TypeError(
            f"step.update: the optimizer's update returned {named(found)}, expected a pair: updates, state."
        )
    new, after = found
    if not isinstance(new, Sharded) or set(new.groups) != set(updates.groups):
        raise TypeError(
            f"step.update: the optimizer's update returned {named(new)} for updates, expected a tree of buffers like "
            "grads. Use grads.map(fn), or a tree_map over grads."
        )
    _need_buffers("the optimizer's update", new, updates)
    trees, given = trees_of(after), trees_of(state)
    for tree, old in zip(trees, given, strict=True) if len(trees) == len(given) else ():
        _need_buffers("the optimizer's next state", tree, old)
        for key in tree.groups:
            row = tree.layout.groups[key].row
            if isinstance(row.policy.moment, torch.dtype):
                need_dtype(f"step.update: params[{row.path!r}]: the optimizer's next state is", tree.local(key), row)
    return map_trees(_without_gaps, (new, after))


def need_params(given: object, before: Sequence[int]) -> None:
    """Refuses writes to the params that an update was given: they would be lost, or be in the old state.

    Args:
        before: the versions of what was given.
    """
    for key, version, now in zip(given.groups if before else (), before, versions(given), strict=True):  # type: ignore[attr-defined]
        if now != version:
            leaves = ", ".join(repr(slot.path) for slot in given.layout.groups[key].slots)  # type: ignore[attr-defined]
            raise ValueError(
                f"step.update: the optimizer's update writes in place to the params of leaf {leaves}. Return what is "
                "to be added to them as its updates."
            )


def versions(tree: object) -> Sequence[int]:
    """Those of a tree's buffers, in the order of its groups."""
    if not isinstance(tree, Sharded):
        return ()
    return [private.version(tree.local(key)) for key in tree.groups]


def _without_gaps(tree: Sharded) -> Sharded:
    cleaned = dict[object, torch.Tensor]()
    for key, x in tree.locals().items():
        there = torch.ones(x.shape, dtype=torch.bool, device=x.device)
        gaps = tree.layout.gaps(key, tree.rank_of(key), there)
        for gap in gaps:
            gap.zero_()
        cleaned |= {key: torch.where(there, x, 0)} if gaps else {}
    return tree.replaced(buffers={**tree.entries, **cleaned}) if cleaned else tree


def _need_buffers(what: str, new: Sharded, old: Sharded) -> None:
    for key in [key for key in new.groups if key in old.groups]:
        x, own = new.local(key), old.local(key)
        if x.shape != own.shape or (x.is_complex() and not own.is_complex()):
            leaves = ", ".join(repr(slot.path) for slot in new.layout.groups[key].slots)
            raise ValueError(
                f"step.update: {what} of the buffer of leaf {leaves} is {named(x)}, expected real numbers in the shape "
                f"that it was given, {tuple(own.shape)}. A buffer is this rank's flat slice of its leaves. If the "
                "optimizer needs rows or whole leaves, use fz.whole(optimizer)."
            )
