"""What is computed of a tensor that a function holds is computed again where another one stands for it."""

from __future__ import annotations

import dataclasses
import functools

import torch

import fzero as fz
from fzero.testing import run_ranks


@dataclasses.dataclass
class _Scaled:
    scale: torch.Tensor

    @functools.cached_property
    def doubled(self) -> torch.Tensor:
        return 2 * self.scale

    def loss(self, p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return (p["w"] * x * self.doubled).sum()


def test_what_was_computed_of_a_differentiated_tensor_is_computed_again() -> None:
    def rank_main(rank: int) -> torch.Tensor:
        def value(scale: torch.Tensor) -> torch.Tensor:
            own = _Scaled(scale)
            assert own.doubled.ndim == 0
            step = fz.shard_zero3(fz.train_step(own.loss, fz.sgd(0.1)))
            return step.forward(step.init({"w": torch.ones(2)}), torch.ones(2))

        return torch.func.grad(value)(torch.tensor(3.0))

    assert run_ranks(rank_main, 2) == [4.0, 4.0]
