"""Members of ensembles: functions, params and batches, and what it is that a member's state equals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import scenarios
import torch
from exactness import SCENARIOS
from exactness import SHARDS as SHARDS

import fzero as fz
from fzero.testing import assert_trees_close

F64 = torch.float64
MEMBERS = 3
OPTIMIZERS: dict[str, Callable[[Any], fz.GradientTransformation]] = {
    "sgd": lambda lr: fz.sgd(lr, weight_decay=0.1),
    "momentum": lambda lr: fz.sgd(lr, momentum=0.9),
    "adamw": lambda lr: fz.adamw(lr),
    "adam": lambda lr: fz.adam(lr, weight_decay=0.1),
    "lion": lambda lr: fz.lion(lr),
    "clipped": lambda lr: fz.chain(fz.clip_by_global_norm(0.3), fz.adamw(lr)),
    "clamped": lambda lr: fz.chain(fz.clip_by_value(0.02), fz.sgd(lr)),
    "scheduled": lambda lr: fz.adamw(fz.linear(lr, lr * 0.1, 3)),
    "partition": lambda lr: fz.partition(
        {"blocks.0.*": fz.sgd(lr), "*": fz.chain(fz.clip_by_global_norm(1.0), fz.adam(lr))}
    ),
}


def stacked(batches: Sequence[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.stack(parts) for parts in zip(*batches, strict=True))


def same_states(found: fz.TrainState, want: fz.TrainState, rtol: float = 1e-10) -> None:
    assert (found.step, found.signature) == (want.step, want.signature)
    for own, its in ((found.params, want.params), (found.moments, want.moments), (found.extra, want.extra)):
        assert_trees_close(own, its, rtol=rtol, atol=1e-13)
    assert_trees_close(fz.gather(found.params), fz.gather(want.params), rtol=rtol, atol=1e-13)


def usable(chosen: Any) -> Any:
    return [pair for pair in chosen if pair[0] != "donate"]  # which is refused


def of_members(scenario: str, **sizes: Any) -> tuple[Any, list[Any]]:
    """The function and the members' params."""
    make = SCENARIOS[scenario][0]
    return make(**sizes)[0], [make(seed=seed, **sizes)[1] for seed in range(MEMBERS)]


def batches_at(world: int, seed: int = 0, **sizes: Any) -> list[list[Any]]:
    """Rank -> each member's batch."""
    drawn = [scenarios.vector_batches(world, seed=seed + member, **sizes) for member in range(MEMBERS)]
    return [[drawn[member][rank] for member in range(MEMBERS)] for rank in range(world)]
