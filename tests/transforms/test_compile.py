"""fz.compile: the numbers of eager, few graphs, and everything that a pullback may be asked for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nightly import by_turns, in_turns
from torch import nn
from torch._dynamo.utils import counters

import fzero as fz
from fzero.testing import run_ranks

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 8, blocks: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def module_step(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> tuple[fz.Step, Any]:
    torch.manual_seed(0)
    apply, params = fz.functional(Model(dropout=dropout).to(dtype))
    schedule = fz.linear(0.1, 0.0, 10)  # another learning rate at every step
    return fz.train_step(lambda p, x: apply(p, x).square().mean(), fz.sgd(schedule)), params


def unique_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def rank_batch(rows: int = 4, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * 8, dtype=dtype).reshape(rows, 8)


def run_three(step: fz.Step, params: Any, x: torch.Tensor) -> tuple[list[float], Any]:
    state, losses = step.init(params), []
    for _ in range(3):
        state, metrics = step(state, x)
        losses.append(metrics["loss"].item())
    return losses, fz.gather(state.params)


SHARDS: list[Callable[[fz.Step], fz.Step]] = [lambda s: s, fz.shard_zero1, fz.shard_zero2, fz.shard_zero3]


@in_turns(12, "compiled by torch")
@pytest.mark.parametrize(("stage", "remat"), by_turns(range(4), [False, True]))
def test_compiled_and_eager_agree(stage: int, remat: bool) -> None:
    """With a dropout, whose random numbers are the same."""

    def rank_main(rank: int) -> None:
        step, params = module_step(dropout=0.5)
        step = SHARDS[stage](fz.remat(step) if remat else step)
        some = "blocks.1.*" if stage == 2 else "*"
        torch.testing.assert_close(
            run_three(fz.compile(step, pattern=some), params, rank_batch()),
            run_three(step, params, rank_batch()),
            rtol=1e-10,
            atol=1e-12,
        )

    run_ranks(rank_main, 1)


@in_turns(12, "compiled by torch")
def test_compiled_on_two_processes() -> None:
    run_ranks(_two_ranks, 2, backend="processes", timeout=240)


def _two_ranks(rank: int) -> None:
    step, params = module_step()
    step = fz.shard_zero3(step)
    want = run_three(step, params, rank_batch() + rank)
    got = run_three(fz.compile(step), params, rank_batch() + rank)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@in_turns(12, "compiled by torch")
def test_units_of_one_code_share_a_graph() -> None:
    """For all steps one graph of the first block, whose input has no gradient, and one of all others; one without any
    gradients; and the first two once more when the batch size changes."""
    torch._dynamo.reset()
    counters.clear()
    step, params = module_step()
    step = fz.compile(step)
    state = step.init(params)
    for _ in range(3):
        state, _ = step(state, rank_batch())
    assert unique_graphs() == 2
    step.forward(state, rank_batch())
    step.forward(state, rank_batch())
    assert unique_graphs() == 3
    for rows in (5, 6, 7):
        state, _ = step(state, rank_batch(rows))
    assert unique_graphs() == 5
    assert not counters["graph_break"]


def test_a_pure_function_as_a_unit() -> None:
    torch._dynamo.reset()
    counters.clear()
    block = fz.unit(lambda p, x: torch.tanh(x @ p["w"]))
    params = [{"w": torch.eye(8, dtype=torch.float64) * (i + 1)} for i in range(3)]

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p:
            x = block(q, x)
        return x.sum()

    step = fz.train_step(fn, fz.sgd(0.1))
    ours, theirs = (run_three(s, params, rank_batch()) for s in (fz.compile(step), step))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert unique_graphs() == 2


def test_any_cotangent_twice_and_a_second_derivative() -> None:
    torch.manual_seed(0)
    apply, params = fz.functional(Model().double())
    step = fz.train_step(apply, fz.sgd(0.1))
    cotangent = torch.linspace(0, 1, 32, dtype=torch.float64).reshape(4, 8)
    results = []
    for chosen in (fz.compile(step), step):
        state = chosen.init(params)
        _, pullback = chosen.vjp(state, rank_batch())
        first, (back,) = pullback(cotangent, retain_graph=True)
        second, _ = pullback(cotangent.square())
        loss_step = fz.with_fn(chosen, lambda p, x: apply(p, x).square().mean())
        product = fz.hvp(loss_step, state, first, rank_batch())
        results.append((fz.gather(first), fz.gather(second), back, fz.gather(product)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-12)


@in_turns(12, "compiled by torch")
def test_autocast() -> None:
    step, params = module_step(dtype=torch.float32)
    step = fz.shard_zero3(fz.autocast(step))
    x = rank_batch(dtype=torch.float32)

    def rank_main(rank: int) -> None:
        ours, theirs = (run_three(s, params, x) for s in (fz.compile(step), step))
        torch.testing.assert_close(ours[0], theirs[0], rtol=2e-2, atol=1e-3)  # fused kernels round to bf16 less often

    run_ranks(rank_main, 1)
