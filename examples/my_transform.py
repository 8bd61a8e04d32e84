"""How to write a transform: an exponential moving average of the params (Polyak & Juditsky 1992), around any step.

A step has `init`, `__call__` and `forward`, and `state.params` can be mapped over; a transform that adds state needs no
more. `map` sees this rank's slices only, so the average is sharded at every stage, also where the params are not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import fzero as fz


class EmaState(NamedTuple):
    state: fz.TrainState
    average: fz.Sharded


class Ema(NamedTuple):
    """After every update `average = decay * average + (1 - decay) * params`; `forward` uses the average."""

    step: fz.Step
    decay: float

    def init(self, params: Any, **options: Any) -> EmaState:
        state = self.step.init(params, **options)
        return EmaState(state, state.params.map(torch.clone))  # a donating step overwrites the params

    def __call__(self, ema: EmaState, *inputs: Any, **options: Any) -> tuple[EmaState, dict[str, Any]]:
        state, metrics = self.step(ema.state, *inputs, **options)
        average = ema.average.map(lambda a, p: torch.lerp(p, a, self.decay), state.params)
        return EmaState(state, average), metrics

    def forward(self, ema: EmaState, *inputs: Any, **options: Any) -> Any:
        return self.step.forward(ema.state.replace(params=ema.average), *inputs, **options)
