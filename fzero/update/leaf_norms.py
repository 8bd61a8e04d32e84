"""The metric "leaf_norms" of an update: norms of params, grads, updates and moments, leaf by leaf.

The old params are kept for it, and the new values are read again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fzero.formats.formats import Stored
from fzero.state.counts import trained_moments
from fzero.state.leaf_norms import (
    Squares,
    moment_norms,
    moments_by_name,
    named_squares,
    norms_by_leaf,
    norms_of_squares,
    parts_of,
)
from fzero.state.sharded import Sharded
from fzero.table.layout import Key

_TREES = ("params", "grads", "updates")  # the other names are those of moments
Metric = dict[str, object]


class Changes:
    """What is kept of an update on its way for the norms of its leaves."""

    def __init__(self) -> None:
        self._old: dict[Key, Stored] = {}
        self._found = list[Squares]()

    def keep(self, params: Sharded) -> None:
        """Keeps some groups, as they are stored, that are about to be written to."""
        own = {key: params.stored(key) for key in params.groups}
        self._old |= {key: Stored(x.format, tuple([part.clone() for part in x.parts])) for key, x in own.items()}

    def measure(self, params: Sharded) -> None:
        """Measures those that have been written to, and leaves what was kept."""
        for key in params.groups:
            new, old = _wide(params.local(key)), self._old.pop(key)
            update = params.with_buffers({key: new - old.to(new.dtype)})
            self._found += [*parts_of("params", params.only([key])), *parts_of("updates", update)]

    def found(self, moments: object) -> list[Squares]:
        """The squares of this rank's parts after the update."""
        return [*self._found, *_of_moments(moments)]


def metric(
    params: Sharded, moments: object, grads: Mapping[int, torch.Tensor] | None, changes: Changes | None
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
        (now,) = parts_of("params", own)
        parts = [now, now._replace(name="updates", sums=torch.zeros_like(now.sums)), *_of_moments(moments)]
    if grads:
        parts = [named_squares("grads", grads), *parts]
    norms = norms_of_squares(parts, own)
    nothing = {path: torch.full_like(x, torch.nan) for path, x in norms["params"].items()}
    return _ordered({"grads": nothing, **norms})


def differentiable_metric(old: Sharded, params: Sharded, moments: object, grads: Sharded) -> Metric:
    """The same where a transform goes on through the update, of its trees."""
    before, after = (tree.only(tree.layout.trainable) for tree in (old, params))
    norms = {"params": norms_by_leaf(after), "grads": norms_by_leaf(grads)}
    norms["updates"] = norms_by_leaf(after.map(torch.sub, before))
    return _ordered(norms | moment_norms(trained_moments(moments)))


def _wide(x: torch.Tensor) -> torch.Tensor:
    """At least in single precision, in which a difference of close values is exact."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _of_moments(moments: object) -> list[Squares]:
    every = moments_by_name(trained_moments(moments)).items()
    return [part for name, trees in every for tree in trees for part in parts_of(name, tree)]


def _ordered(norms: Mapping[str, Mapping[str, torch.Tensor]]) -> Metric:
    moments = {name: own for name, own in norms.items() if name not in _TREES}
    return {**{name: norms[name] for name in _TREES}, "moments": moments}
