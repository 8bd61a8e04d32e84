"""What functions come to, which is looked through in a run."""

from __future__ import annotations

import dataclasses
import functools

import torch

import fzero as fz
from fzero.base.rebound import _reached, _walked
from fzero.testing import run_ranks

_WEIGHTS = {"w": torch.ones(2)}


def _asserts(x: torch.Tensor) -> torch.Tensor:
    assert x.ndim == 1
    return x @ _WEIGHTS["w"]


def test_assertions_that_pytest_rewrites_do_not_lead_to_all_of_the_session() -> None:
    assert any(name.startswith("@") for name in _asserts.__code__.co_names)
    found, _ = _walked(_asserts, _reached)
    assert any(x is _WEIGHTS["w"] for x in found) and len(found) < 100


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
