"""What holds around a call in the caller's process alone: ranks have it, too, or it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from settings import default_dtype

import fzero as fz

X = torch.full((4, 3), 1.2345)


def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ p["w"]).mean()


def built(rank: int) -> tuple[Any, Any]:
    return fz.train_step(fn, fz.sgd(0.1)), {"w": torch.ones(3, 3, dtype=torch.float32)}


@pytest.mark.parametrize("on", ["threads", "processes"])
def test_autocast_around_a_call_is_refused(on: str) -> None:
    """It would change the same function in this process, and reaches no rank."""
    with fz.remote(built, 1, on, timeout=20) as own:
        state = own.init()
        for call in (own, own.vjp, own.forward):
            with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"fz\.autocast"):
                call(state, X)
        fz.fetch(own(state, X))


@pytest.mark.parametrize("on", ["threads", "processes"])
def test_the_default_dtype_is_that_of_the_start(on: str) -> None:
    x = torch.ones(3, dtype=torch.float64)
    with default_dtype(torch.float64), fz.remote(makes, 1, on, timeout=20) as own:
        state = own.init()
        assert own.forward(state, x).dtype == torch.float64
        with default_dtype(torch.float32), pytest.raises(ValueError, match="default dtype"):
            own.forward(state, x)
        assert own.forward(state, x).dtype == torch.float64


def makes(rank: int) -> tuple[Any, Any]:
    """A function whose output has the default dtype."""
    step = fz.train_step(lambda p, x: torch.zeros(3) + (p["w"] * x).sum().float(), fz.sgd(0.1))
    return step, {"w": torch.ones(3, dtype=torch.float32)}
