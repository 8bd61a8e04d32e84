"""Norms leaf by leaf, over all shards: of params, grads, updates and moments; the metric "leaf_norms"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fzero.base import pytree
from fzero.base.follow import root
from fzero.state.counts import trained_moments
from fzero.state.sharded import Sharded, is_sharded, trees_of
from fzero.state.squares import LeafSquares, over_ranks, squares_of

_TREES = ("params", "grads", "updates")  # the other names are those of moments
Metric = dict[str, object]
Norms = dict[str, torch.Tensor]  # path of a leaf -> 0-d float64
Named = tuple[str, LeafSquares]  # a tree's name, and the sums of squares of this rank's parts of its leaves


def norms_by_leaf(tree: Sharded) -> Norms:
    """Leaf path -> the norm of the leaf's decoded values over all shards."""
    return norms_of_squares([("", squares_of(tree))], tree)[""]


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


def moment_squares(moments: object) -> list[Named]:
    return [(name, squares_of(tree)) for name, trees in moments_by_name(moments).items() for tree in trees]


def moment_norms(moments: object) -> dict[str, Norms]:
    """Name of a moment -> leaf path -> norm."""
    trees = trees_of(moments)
    return norms_of_squares(moment_squares(moments), trees[0]) if trees else {}


def norms_of_squares(trees: Sequence[Named], like: Sharded) -> dict[str, Norms]:
    """Name of a tree -> the norms of its leaves, of this rank's parts of them: one exchange for all.

    Args:
        trees: of the same leaves, in the same order, on all ranks.
    """
    out: dict[str, Norms] = {name: {} for name, _ in trees}
    names = sorted([(leaf, name) for name, own in trees for leaf in own.leaves], key=lambda pair: pair[0])
    if names:
        vector = torch.cat([own.vector.to(like.device) for _, own in trees])
        squares = LeafSquares([leaf for _, own in trees for leaf in own.leaves], vector)  # in the order of names
        for (leaf, name), norm in zip(names, root(over_ranks(squares, like)).unbind(), strict=True):
            out[name][like.layout.rows[leaf].path] = norm
    return out


def metric(old: Sharded, params: Sharded, moments: object, grads: LeafSquares | None) -> Metric:
    """The norms after an update; NaN for grads that nobody has come to know.

    Args:
        old: the params before it; the same ones where it was skipped.
        grads: squares of this rank's parts.
    """
    before, after = (tree.only(tree.layout.trainable) for tree in (old, params))
    if not after.groups:  # all is frozen
        return _ordered({name: {} for name in _TREES})
    parts = [("params", squares_of(after)), *moment_squares(trained_moments(moments))]
    if params is old:
        parts.append(("updates", LeafSquares(parts[0][1].leaves, torch.zeros_like(parts[0][1].vector))))
    for key in after.groups if params is not old else ():
        new = after.local(key)
        new = new.to(torch.promote_types(new.dtype, torch.float32))  # in which differences of close values are exact
        update = after.with_buffers({key: new - before.local(key).to(new.dtype)})
        parts.append(("updates", squares_of(update)))
    norms = norms_of_squares([("grads", grads), *parts] if grads is not None else parts, after)
    nothing = {path: torch.full_like(x, torch.nan) for path, x in norms["params"].items()}
    return _ordered({"grads": nothing, **norms})


def _ordered(norms: Mapping[str, Mapping[str, torch.Tensor]]) -> Metric:
    moments = {name: own for name, own in norms.items() if name not in _TREES}
    return {**{name: norms[name] for name in _TREES}, "moments": moments}
