"""`fz.unit(fn, prove=False)`: a unit that nothing proves, whose first run runs it once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from units import forms

import fzero as fz
from fzero.testing import RankError, run_ranks, strict

Transform = Callable[[fz.Step], fz.Step]
TRANSFORMS = forms("plain", "remat", "ZeRO-3", "ZeRO-3, remat")


def stepped(transform: Transform, prove: bool, store: list[torch.Tensor]) -> tuple[fz.Step, fz.TrainState]:
    def noted(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ p["w"])
        store.append(y.detach())  # which outlives the run
        return y

    block = fz.unit(noted, prove=prove)

    def loss(params: dict[str, list[dict[str, torch.Tensor]]], x: torch.Tensor) -> torch.Tensor:
        for p in params["blocks"]:
            x = block(p, x)
        return x.square().mean()

    step = transform(fz.train_step(loss, fz.sgd(0.1)))
    generator = torch.Generator().manual_seed(0)
    params = {"blocks": [{"w": torch.randn(3, 3, generator=generator, dtype=torch.float64)} for _ in range(2)]}
    return step, step.init(params)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_not_proven_runs_once_and_computes_the_same(name: str, ranks: int) -> None:
    def run(rank: int, prove: bool) -> tuple[int, list[torch.Tensor], str]:
        store: list[torch.Tensor] = []
        step, state = stepped(TRANSFORMS[name], prove, store)
        x = torch.full((2, 3), 0.5, dtype=torch.float64)
        out = []
        for _ in range(3):
            state, metrics = step(state, x)
            out.append(metrics["loss"])
        report = repr(fz.check_pure(step, state, x)) if not prove else ""
        return len(store), [*out, *(x["w"] for x in fz.gather(state.params)["blocks"])], report

    with pytest.raises(RankError, match="keeps a tensor"):
        run_ranks(lambda rank: run(rank, True), ranks)
    step, state = stepped(lambda step: step, False, [])
    want = []
    for _ in range(3):
        state, metrics = step(state, torch.full((2, 3), 0.5, dtype=torch.float64))
        want.append(metrics["loss"])
    want += [x["w"] for x in fz.gather(state.params)["blocks"]]
    for calls, got, report in run_ranks(lambda rank: run(rank, False), ranks):
        again = 2 if "remat" in name else 1
        assert calls >= 3 * 2 * again
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
        assert report.count("not proven (prove=False)") == 2, report
        assert "as far as they are proven" in report


def test_in_a_first_run_it_runs_once() -> None:
    def run(rank: int) -> None:
        store: list[torch.Tensor] = []
        step, state = stepped(fz.shard_zero3, False, store)
        step.forward(state, torch.ones(2, 3, dtype=torch.float64))
        assert len(store) == 2
        with strict():
            step(state, torch.ones(2, 3, dtype=torch.float64))
        assert len(store) == 4

    run_ranks(run, 1)
