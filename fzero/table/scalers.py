"""Loss scales: one interface, also for a step without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class ScaleState(NamedTuple):
    """The loss scale, and how many updates in a row were finite since it last changed."""

    scale: float = 1.0
    finite: int = 0


class NoLossScale:
    """The loss scale of a step without one: 1, always."""

    def initial(self) -> ScaleState:
        return ScaleState()

    def adjust(self, state: ScaleState, finite: bool) -> ScaleState:
        return state


@dataclass(frozen=True)
class StaticLossScale:
    """One scale for the whole run."""

    scale: float

    @property
    def kind(self) -> str:
        return f"loss_scale({self.scale})"

    def initial(self) -> ScaleState:
        return ScaleState(self.scale)

    def adjust(self, state: ScaleState, finite: bool) -> ScaleState:
        return state


@dataclass(frozen=True)
class DynamicLossScale:
    """Doubles after `interval` finite updates in a row, halves after one that is not, never below `minimum`."""

    scale: float = 2.0**16
    interval: int = 2000
    factor: float = 2.0
    minimum: float = 1.0

    @property
    def kind(self) -> str:
        return "a dynamic loss_scale"

    def initial(self) -> ScaleState:
        return ScaleState(self.scale)

    def adjust(self, state: ScaleState, finite: bool) -> ScaleState:
        if not finite:
            return ScaleState(max(self.minimum, state.scale / self.factor))
        if state.finite + 1 >= self.interval:
            return ScaleState(state.scale * self.factor)
        return ScaleState(state.scale, state.finite + 1)
