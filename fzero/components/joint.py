"""The update of several components as one: their norm over all leaves, and the same decision for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from fzero.base import private
from fzero.base.arguments import as_float64
from fzero.base.follow import root
from fzero.components.parts import PerStage, PipelineState
from fzero.components.places import AllPlaces, tried
from fzero.components.remote.component import fetch
from fzero.components.stages import Stage, Weighed
from fzero.state.gather import sum_by_leaf
from fzero.state.metrics import Metrics


def updated(
    stages: Mapping[int, Stage],
    state: PipelineState,
    grads: PerStage,
    grad_norm: object,
    places: AllPlaces,
) -> tuple[PipelineState, Metrics]:
    """The next states and the metrics.

    Args:
        stages: component -> stage, of those that run in this place.
        grad_norm: what to clip by instead of the norm over all components.
        places: of all components.
    """
    weighed: dict[int, Weighed] = {}

    def weigh() -> dict[int, tuple[Any, Mapping[str, object], int]]:
        weighed.update({c: stage.weighed(state[c], grads[c]) for c, stage in stages.items()})
        count = lambda c: -1 if stages[c].distant else state[c].step
        return {c: (fetch(weight.by_leaf), weight.metrics, count(c)) for c, weight in weighed.items()}

    said = places.of_all(*tried(weigh))
    every = {c: by_leaf for c, (by_leaf, *_) in said.items()}
    counts = {c: count for c, (_, _, count) in said.items() if count >= 0}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"pipeline: the components' states are after {counts} updates, by component; expected the same number of "
            "all. Go on from states that one call has returned."
        )
    norm = root(sum_by_leaf([x for c in sorted(every) for x in every[c].unbind()]))
    # one that is not finite skips all, whatever they are to be clipped by
    clip = norm if grad_norm is None else _chosen(norm, grad_norm)
    # all have the next state, or none
    made = places.agree(lambda: {c: stage.update(state[c], weighed[c], clip) for c, stage in stages.items()})
    new, found = ({c: own[i] for c, own in made.items()} for i in range(2))
    skipped = next(iter(found.values()))["skipped"]  # which all do, or none
    elsewhere = {c: {**known, "skipped": skipped} for c, (_, known, _) in said.items() if c not in found}
    metrics = {**_metrics(dict(sorted({**fetch(found), **elsewhere}.items()))), "grad_norm": norm}
    return PipelineState([new.get(c) for c in range(len(state))], places), cast(Metrics, metrics)


def _chosen(norm: torch.Tensor, given: object) -> object:
    """The norm that is given, where the components' own one is finite."""
    if private.is_mapped(norm):
        return torch.where(torch.isfinite(norm), as_float64(given), norm)
    return given if bool(torch.isfinite(norm)) else norm


def _alike(value: object, first: object) -> bool:
    """Tells whether a metric is the same in two components, and for all members of a map."""
    if not (isinstance(value, torch.Tensor) and isinstance(first, torch.Tensor)):
        return bool(value == first)
    with private.below_transforms():
        return bool((private.unwrapped(value) == private.unwrapped(first)).all())


def _metrics(found: Mapping[int, Mapping[str, object]]) -> dict[str, object]:
    """The components' metrics by name; those that differ between them with the component's number."""
    out: dict[str, object] = {}
    for name in dict.fromkeys(name for own in found.values() for name in own if name != "grad_norm"):
        values = {c: own[name] for c, own in found.items() if name in own}
        first = next(iter(values.values()))
        alike = all(_alike(value, first) for value in values.values())
        out |= {name: first} if alike else {f"{name}.{c}": value for c, value in values.items()}
    return out
