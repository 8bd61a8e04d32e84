"""State that a transform adds to a step: what it keeps, how it begins and how an update changes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

METRICS = ("loss", "grad_norm", "lr", "skipped", "aux")


@dataclass(frozen=True)
class Extra:
    """One entry of `state.extra`. Its functions are pure, and the same on every rank.

    Attributes:
        name: by which it is found there.
        source: what the user said, which tells two entries of one name apart.
        init: `init(params) -> value`, of the sharded params: a tree of `Sharded`, tensors and what is no tensor.
        update: `update(value, params, applied) -> value`, of the same structure, after every update, of the params
            that it left; `applied` is False where it was skipped, as a gradient was not finite.
        scale: `scale(value)`, by which cotangents are multiplied inside the pullback: grads carry it, and `update`,
            `add_grads` and `fz.gather` take it off.
        kind: what a state must have been made with to be one of this step's; `source` by default.
        expendable: whether `fz.convert` may drop it, or begin it anew, without being told.
    """

    name: str
    source: str
    init: Callable[..., object]
    update: Callable[..., object]
    scale: Callable[..., float] | None = None
    kind: str = ""
    expendable: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", self.kind or self.source)
        if self.name in METRICS:
            raise ValueError(
                f"{self.source}: got the name {self.name!r} for an entry of state.extra, which is that of a metric; "
                f"expected another one than {', '.join(map(repr, METRICS))}."
            )

    def factor(self, value: object) -> float:
        """The scale, by which cotangents are multiplied; 1 where it has none, an error where it is not positive."""
        factor = float(self.scale(value)) if self.scale else 1.0
        if not 0.0 < factor < math.inf:
            raise ValueError(
                f"state.extra[{self.name!r}] ({self.source}): got a scale of {factor}, expected a positive number that "
                "is the same on every rank."
            )
        return factor
