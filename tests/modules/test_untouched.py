"""A call must not change what a module consists of, and what it changed is put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fzero as fz
from fzero.testing import run_ranks


def test_with_buffers_it_is_said_what_a_buffer_is() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.held = nn.Parameter(torch.ones(1)), torch.zeros(1)
            self.register_buffer("later", None)

        def forward(self, x: torch.Tensor, params: str) -> torch.Tensor:
            if params == "held":
                self.held.add_(1)
            else:
                self.later = torch.zeros(1)
            return x * self.weight

    apply, params, buffers = fz.functional(Held(), buffers=True)
    for name in ("held", "later"):
        with pytest.raises(ValueError, match=rf"{name}.*self\.register_buffer"):
            apply(params, buffers, torch.ones(1), params=name)  # a name that a forward may have, too


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(1, 1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x) + self.calls


def test_attributes_are_the_copys_own_and_count() -> None:
    module = Counts()
    apply, params = fz.functional(module)
    first, second = (apply(params, torch.ones(1, 1)) for _ in range(2))
    torch.testing.assert_close(second - first, torch.ones(1, 1))
    assert module.calls == 0


def test_batch_norm_in_training_says_what_to_do() -> None:
    apply, params = fz.functional(nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match=r"num_batches_tracked.*buffers=True\).*call module.eval\(\)"):
        apply(params, torch.randn(4, 2))


class Moves(nn.Module):
    """Has its table where its input is, as one writes who would move it by hand."""

    def __init__(self, blocks: int = 0) -> None:
        super().__init__()
        self.inner, self.table = nn.Linear(2, 2), nn.Buffer(torch.tensor([2.0, 3.0]))
        self.blocks = nn.ModuleList(Moves() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        self.table = self.table.to(device=x.device, dtype=x.dtype)
        return self.inner(x) * self.table


@pytest.mark.parametrize("carries", [False, True])
@pytest.mark.parametrize("remat", [False, True])
def test_a_buffer_that_is_moved_to_where_it_is_has_not_changed(carries: bool, remat: bool) -> None:
    """Under torch.func an operation that does nothing returns another tensor object."""
    module = Moves(blocks=2).double()
    x = torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want = torch.autograd.grad(module(x).sum(), list(module.parameters()))
    apply, params, *buffers = fz.functional(module, buffers=True) if carries else fz.functional(module)

    def loss(params: Any, *inputs: Any) -> Any:
        out = apply(params, *inputs)
        return (out[0].sum(), out[1]) if carries else out.sum()

    step = fz.shard_zero3(fz.train_step(loss, fz.sgd(0.1)))
    step = fz.carry(step, buffers[0]) if carries else step
    step = fz.remat(step) if remat else step

    def rank_main(rank: int) -> Any:
        state = step.init(params)
        out, pullback, *_ = step.vjp(state, x)
        grads = fz.gather(pullback(torch.ones_like(out))[0])
        step(step(state, x)[0], x)
        return list(grads.values())

    for found in run_ranks(rank_main, 2):
        torch.testing.assert_close(found, list(want), rtol=1e-12, atol=0.0)
    assert module.table.tolist() == [2.0, 3.0]
