"""What is whole and meets a tensor rank's slices: torch's error is told whose slices they are, and what to do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fzero as fz
from fzero.testing import RankError, run_ranks

TOLD = r"this rank's slices of what 'up' gives.*'row' of the module.*'column_gather'"


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)


class OnlyUp(Up):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)).sum()


class TimesParam(Up):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) * self.gain).sum()


PLANS = {OnlyUp: {"up": "column"}, TimesParam: {"up": "column", "down": "row"}}


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("sequence", [False, True])
def test_what_is_whole_meets_slices(kind: type[Up], sequence: bool) -> None:
    apply, params = fz.functional(kind())

    def rank(_: int, wrap: Callable[[Any], Any]) -> None:
        step = fz.shard_tensor(fz.train_step(apply, fz.sgd(0.1)), PLANS[kind], sequence=sequence)
        wrap(step).forward(step.init(params), torch.ones(2, 2, 4))

    wraps: tuple[Callable[[Any], Any], ...] = (lambda step: step, fz.remat)
    for wrap in wraps:
        with pytest.raises(RankError, match=TOLD):
            run_ranks(functools.partial(rank, wrap=wrap), 2)
