"""fz.check_pure: functions that are pure pass; those that are not are in `impure`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nightly import in_turns
from torch.utils.checkpoint import checkpoint
from units import forms

import fzero as fz
from fzero.testing import run_ranks

F64 = torch.float64
X = torch.linspace(-1.0, 1.0, 12, dtype=F64).view(3, 4)
STEPS = forms("plain", "ZeRO-3", "ZeRO-3, remat")
CONSTANT = torch.full((4,), 1.5, dtype=F64)
TABLE = {"scale": 2.0, "shift": CONSTANT}


def params() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    blocks = [{"w": torch.randn(4, 4, generator=generator, dtype=F64), "b": torch.ones(4, dtype=F64)} for _ in range(2)]
    return {"blocks": blocks, "g": torch.ones(4, dtype=F64)}


def checked(body: Any, how: str, ranks: int = 1) -> list[Any]:
    """What `check_pure` says of a step whose units run this."""
    block = fz.unit(body)

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            x = block(q, x)
        return (x * p["g"]).square().mean()

    def rank_main(rank: int) -> Any:
        step = STEPS[how](fz.train_step(fn, fz.sgd(0.1)))
        state = step.init(params())
        before = fz.gather(state.params)
        try:
            return fz.check_pure(step, state, X.clone())
        except (ValueError, TypeError) as error:
            return error
        finally:
            for own, was in zip(fz.gather(state.params)["blocks"], before["blocks"], strict=True):
                assert torch.equal(own["w"], was["w"])

    return run_ranks(rank_main, ranks)


PURE: dict[str, Any] = {
    "a layer": lambda q, x: torch.tanh(x @ q["w"] + q["b"]),
    "a constant": lambda q, x: torch.tanh(x @ q["w"]) * CONSTANT,
    "a table": lambda q, x: torch.tanh(x @ q["w"]) * TABLE["scale"] + TABLE["shift"],
    "dropout": lambda q, x: F.dropout(torch.tanh(x @ q["w"]), 0.3),
    "its own in place": lambda q, x: (x @ q["w"]).add_(q["b"]).tanh_(),
    "its own list": lambda q, x: sum([x @ q["w"], q["b"]], start=torch.zeros((), dtype=F64)),
    "a gradient inside": lambda q, x: x + torch.func.grad(lambda y: torch.tanh(y @ q["w"]).sum())(x),
    "a map inside": lambda q, x: torch.func.vmap(lambda row: torch.tanh(row @ q["w"]))(x),
    "a view of an input": lambda q, x: x.view(4, 3).t().reshape(3, 4) @ q["w"],
    "an input itself": lambda q, x: x,
    "what numbers make": lambda q, x: torch.tanh(x @ q["w"]) * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64),
    "a checkpoint": lambda q, x: checkpoint(lambda y: torch.tanh(y @ q["w"]), x, use_reentrant=False),
    "a branch on a value": lambda q, x: torch.tanh(x @ q["w"]) if x.shape[0] == 3 else x,
}


@in_turns(4)
@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("body", PURE.values(), ids=PURE.keys())
def test_what_is_pure_passes(body: Any, how: str) -> None:
    for report in checked(body, how, ranks=2 if how != "plain" else 1):
        assert [own.unit for own in report.units] == ["blocks.0", "blocks.1"]
        assert "pure" in repr(report)


def test_a_table_that_is_made_once() -> None:
    """Of no argument: a constant, whoever asks for it first."""
    made: dict[int, torch.Tensor] = {}

    def body(q: Any, x: torch.Tensor) -> torch.Tensor:
        if 4 not in made:
            made[4] = torch.arange(4, dtype=F64)
        return torch.tanh(x @ q["w"]) * made[4]

    (report,) = checked(body, "ZeRO-3")
    assert [own.captured for own in report.units] == [1, 1]
