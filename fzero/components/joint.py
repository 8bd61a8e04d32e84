"""The update of several components as one: their norm over all leaves, and the same decision for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fzero.components.parts import PerStage, PipelineState, Places
from fzero.state.gather import over_ranks, squares_of, sum_by_leaf
from fzero.state.sharded import Sharded
from fzero.table.spec import Spec
from fzero.update.update import apply_update, with_kept


def updated(
    steps: Mapping[int, Spec],
    state: PipelineState,
    grads: PerStage,
    grad_norm: object,
    places: Places,
) -> tuple[PipelineState, dict[str, Any]]:
    """The next states and the metrics.

    Args:
        steps: component -> step, of those that run in this place.
        grad_norm: what to clip by instead of the norm over all components.
        places: of all components.
    """
    own: dict[int, Sharded] = {}
    squares: dict[int, Mapping[int, torch.Tensor]] = {}
    by_leaf: dict[int, torch.Tensor] = {}
    error: BaseException | None = None
    try:
        for c in steps:
            own[c] = with_kept(state[c], grads[c])
            squares[c] = squares_of(own[c])
            by_leaf[c] = over_ranks(squares[c], own[c])
    except Exception as caught:
        error = caught
    every = places.of_all(by_leaf, error)
    norm = sum_by_leaf([x for c in sorted(every) for x in every[c].unbind()]).sqrt()
    # one that is not finite skips all, whatever they are to be clipped by
    clip = norm if grad_norm is None or not bool(torch.isfinite(norm)) else grad_norm
    found: dict[int, dict[str, Any]] = {}
    new: dict[int, Any] = {}
    for c, step in steps.items():
        new[c], found[c] = apply_update(step, state[c], own[c], clip, (by_leaf[c].sum(), squares[c]))
    return PipelineState([new.get(c) for c in range(len(state))], places), {**_metrics(found), "grad_norm": norm}


def _metrics(found: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The components' metrics by name; those that differ between them with the component's number."""
    out: dict[str, Any] = {}
    for name in dict.fromkeys(name for own in found.values() for name in own if name != "grad_norm"):
        values = {c: own[name] for c, own in found.items() if name in own}
        first = next(iter(values.values()))
        alike = all(bool(value == first) for value in values.values())
        out |= {name: first} if alike else {f"{name}.{c}": value for c, value in values.items()}
    return out
