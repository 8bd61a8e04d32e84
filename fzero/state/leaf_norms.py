"""Norms leaf by leaf, over all shards: of params, grads, updates and moments; the metric "leaf_norms"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fzero.base import pytree
from fzero.base.follow import root
from fzero.formats.formats import Stored
from fzero.state.counts import trained_moments
from fzero.state.sharded import Sharded, is_sharded, trees_of
from fzero.state.squares import LeafSquares, over_ranks, squares_of
from fzero.table.layout import Key

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


class Changes:
    """What is kept of an update on its way for the norms of its leaves: the old params."""

    def __init__(self) -> None:
        self._old: dict[Key, Stored] = {}
        self._found = list[Named]()

    def keep(self, params: Sharded) -> None:
        """Keeps some groups, as they are stored, that are about to be written to."""
        own = {key: params.stored(key) for key in params.groups}
        self._old |= {key: Stored(x.format, tuple([part.clone() for part in x.parts])) for key, x in own.items()}

    def measure(self, params: Sharded) -> None:
        """Measures those that have been written to, and leaves what was kept."""
        for key in params.groups:
            new, old = _wide(params.local(key)), self._old.pop(key)
            update = params.with_buffers({key: new - old.to(new.dtype)})
            self._found += [("params", squares_of(params.only([key]))), ("updates", squares_of(update))]

    def found(self, moments: object) -> list[Named]:
        """The squares of this rank's parts after the update."""
        return [*self._found, *moment_squares(trained_moments(moments))]


def metric(params: Sharded, moments: object, grads: LeafSquares | None, changes: Changes | None) -> Metric:
    """The norms after an update; NaN for grads that nobody has come to know.

    Args:
        grads: squares of this rank's parts.
        changes: of the update; None where it was skipped.
    """
    own = params.only(params.layout.trainable)
    if not own.groups:  # all is frozen
        return _ordered({name: {} for name in _TREES})
    if changes is not None:
        parts = changes.found(moments)
    else:
        now = squares_of(own)
        none = LeafSquares(now.leaves, torch.zeros_like(now.vector))
        parts = [("params", now), ("updates", none), *moment_squares(trained_moments(moments))]
    norms = norms_of_squares([("grads", grads), *parts] if grads is not None else parts, own)
    nothing = {path: torch.full_like(x, torch.nan) for path, x in norms["params"].items()}
    return _ordered({"grads": nothing, **norms})


def differentiable_metric(old: Sharded, params: Sharded, moments: object, grads: Sharded) -> Metric:
    """The same where a transform goes on through the update, of its trees."""
    before, after = (tree.only(tree.layout.trainable) for tree in (old, params))
    trees = {"params": after, "grads": grads, "updates": after.map(torch.sub, before)}
    parts = [(name, squares_of(tree)) for name, tree in trees.items()]
    return _ordered(norms_of_squares([*parts, *moment_squares(trained_moments(moments))], after))


def _wide(x: torch.Tensor) -> torch.Tensor:
    """At least in single precision, in which a difference of close values is exact."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _ordered(norms: Mapping[str, Mapping[str, torch.Tensor]]) -> Metric:
    moments = {name: own for name, own in norms.items() if name not in _TREES}
    return {**{name: norms[name] for name in _TREES}, "moments": moments}
