"""A state whose params a function, or a backward, writes to in a later run is dead, and says so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawn import prelude

import fzero as fz
from fzero.testing import run_ranks

W, X = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4), torch.ones(2, 4, dtype=torch.float64)


class Scaled(prelude.Scaled):
    """x @ w, whose backward writes to w if it is told to."""

    write: Callable[[torch.Tensor], object] | None = None

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:  # type: ignore[override]
        found = prelude.Scaled.backward(ctx, cotangent)
        if Scaled.write is not None:
            Scaled.write(ctx.saved_tensors[1])
        return found


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("act", [lambda step: step, fz.remat, fz.shard_zero2, fz.donate])
def test_a_later_write(act: Any, half: bool, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def rank_main(rank: int) -> None:
        writes = []

        def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
            if writes and where == "forward":
                p["w"].detach().mul_(2)
            return Scaled.apply(x, p["w"]).tanh().sum()  # type: ignore[operator]

        step = act(fz.train_step(fn, fz.sgd(0.1)))
        state = step.init({"w": W})
        for _ in range(2):
            state, _ = step(state, X)
            pull = step.vjp(state, X)[1]
            pull(torch.ones((), dtype=torch.float64))
        writes.append(1)
        if where == "backward":
            monkeypatch.setattr(Scaled, "write", lambda w: w.detach().mul_(2))
        with pytest.raises(ValueError, match=r"wrote in place to the params of this state \(leaf 'w'\)"):
            pull = step.vjp(state, X)[1]
            (pull.inputs if half else pull)(torch.ones((), dtype=torch.float64))
            with contextlib.suppress(RuntimeError):
                pull.params()
        with pytest.raises(RuntimeError, match="wrote in place to the params of this state"):
            _ = state.params

    run_ranks(rank_main, 1)
