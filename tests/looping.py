"""What tests of fz.loop share: a loop without a bar, a step of one param, and what logs and checkpoints say."""

from __future__ import annotations

import csv
import functools
from pathlib import Path
from typing import Any

import torch

import fzero as fz

quiet: Any = functools.partial(fz.loop, progress=False)
STEP = fz.train_step(lambda p, x: ((p["w"] - x) ** 2).sum(), fz.sgd(0.1))


def begun() -> fz.TrainState:
    return STEP.init({"w": torch.zeros(1)})


def batch(number: int) -> torch.Tensor:
    return torch.full((1,), float(number))


def counted(state: int, *_: object) -> tuple[int, dict[str, float]]:
    return state + 1, {"loss": float(state)}


def run_through(run: Any) -> Any:
    for _ in run:
        pass
    return run


def rows_of(log: Path) -> list[dict[str, str]]:
    with log.open(newline="") as file:
        return list(csv.DictReader(file))


def of_kept(kept: fz.Checkpoints, step: fz.Step = STEP) -> tuple[fz.TrainState, Any]:
    """The last state, and what was saved beside it."""
    found = kept.restore(step)
    assert found is not None
    return found
