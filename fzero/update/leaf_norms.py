"""The metric "leaf_norms" of an update: norms of params, grads, updates and moments, leaf by leaf.

The old params are kept for it, and the new values are read again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fzero.formats.formats import Stored
from fzero.state.counts import trained_moments
from fzero.state.leaf_norms import Named, moment_squares, norms_of_squares
from fzero.state.sharded import Sharded
from fzero.state.squares import LeafSquares, squares_of
from fzero.table.layout import Key

_TREES = ("params", "grads", "updates")  # the other names are those of moments
Metric = dict[str, object]


class Changes:
    """What is kept of an update on its way for the norms of its leaves."""

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


def metric(
    params: Sharded, moments: object, grads: LeafSquares | None, changes: Changes | None
) -> Metric:
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
