"""State that a transform adds to a step: what it keeps, how it begins and how an update changes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Extra:
    """One entry of `state.extra`.

    Attributes:
        name: by which it is found there.
        source: what the user said, which tells two entries of one name apart.
        init: `init(params) -> value`, of the sharded params: a tree of `Sharded`, tensors and what is no tensor.
        update: `update(value, params, applied) -> value`, after every update, of the params that it left; `applied`
            is False where it was skipped, as a gradient was not finite.
        scale: `scale(value)`, by which cotangents are multiplied inside the pullback: grads carry it, and `update`,
            `add_grads` and `fz.gather` take it off.
        kind: what a state must have been made with to be one of this step's; `source` by default.
    """

    name: str
    source: str
    init: Callable[[Any], Any]
    update: Callable[[Any, Any, bool], Any]
    scale: Callable[[Any], float] | None = None
    kind: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", self.kind or self.source)
