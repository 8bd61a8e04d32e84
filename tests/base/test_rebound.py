"""What functions come to, which is looked through in a run."""

from __future__ import annotations

import torch

from fzero.base.rebound import _reached, _walked

_WEIGHTS = {"w": torch.ones(2)}


def _asserts(x: torch.Tensor) -> torch.Tensor:
    assert x.ndim == 1
    return x @ _WEIGHTS["w"]


def test_assertions_that_pytest_rewrites_do_not_lead_to_all_of_the_session() -> None:
    assert any(name.startswith("@") for name in _asserts.__code__.co_names)
    found, _ = _walked(_asserts, _reached)
    assert any(x is _WEIGHTS["w"] for x in found) and len(found) < 100
