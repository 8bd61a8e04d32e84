"""With `sync_batch_norm=True`, what a forward makes of buffers is the same on all ranks, or refused by name on all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nightly import in_turns
from torch import nn

import fzero as fz
from fzero.comm.divergence import recorded_collectives
from fzero.testing import assert_trees_equal, run_ranks

D, F64 = 4, torch.float64


class Moving(nn.Module):
    """A layer, a batch norm of torch's, and a buffer that something is done with."""

    def __init__(self, move: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype = F64) -> None:
        super().__init__()
        self.layer, self.norm, self.move = nn.Linear(D, D, dtype=F64), nn.BatchNorm1d(D, dtype=F64), move
        nn.init.eye_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)
        self.register_buffer("kept", torch.ones(D, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layer(x))
        self.kept = self.move(self.kept, x.detach())
        return x


def by_hand(kept: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return 0.9 * kept + 0.1 * (x + 1).exp().mean(0)


def in_place(kept: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return kept.mul_(0.9).add_(0.1 * x.square().mean(0))


def unseen(kept: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    kept.data.copy_(x[0])
    return kept


def of_one(kept: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return kept * 2 if torch.distributed.get_rank() == 1 else kept


def as_complex(kept: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (kept * torch.polar(torch.ones(D, dtype=F64), x[0])).conj()


def counted(kept: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return kept + (x.sum() + torch.distributed.get_rank()).to(torch.int64)


def by_instance(kept: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    F.instance_norm(x.T[None], kept, kept.clone(), use_input_stats=True)
    return kept


def iterated(kept: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Not of the batch, as spectral norm's are."""
    return F.normalize(kept.cumsum(0), dim=0)


def untouched(kept: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return kept


def not_a_number(kept: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return kept * torch.nan


def other_bits(kept: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Zero and NaN, with this rank's sign."""
    sign = 1.0 - 2.0 * torch.distributed.get_rank()
    return torch.tensor([0.0, torch.nan, 1.0, 2.0], dtype=F64) * torch.tensor([sign, sign, 1.0, 1.0], dtype=F64)


DTYPES = {"as_complex": torch.complex128, "counted": torch.int64}
APART = {each.__name__: each for each in (by_hand, in_place, unseen, of_one, as_complex, by_instance, counted)}
ALIKE = {each.__name__: each for each in (iterated, untouched, not_a_number, other_bits)}
WRAPS: dict[str, Any] = {
    "ZeRO-3": fz.shard_zero3,
    "microbatches": lambda step: fz.accumulate(fz.shard_zero1(step), 2),
    "recomputed": lambda step: fz.remat(fz.shard_zero3(step)),
}


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, D, generator=torch.Generator().manual_seed(rank), dtype=F64)


def step_of(module: nn.Module, wrap: Any, sync: bool = True) -> tuple[fz.Step, Any]:
    apply, params, buffers = fz.functional(module, buffers=True, sync_batch_norm=sync)

    def fn(p: Any, carry: Any, x: torch.Tensor) -> Any:
        out, carry = apply(p, carry, x)
        return out.square().mean(), carry

    return wrap(fz.carry(fz.train_step(fn, fz.sgd(0.1)), buffers)), params


def refused(rank: int, move: str, wrap: str) -> str:
    step, params = step_of(Moving(APART[move], DTYPES.get(move, F64)), WRAPS[wrap])
    state = step.init(params)
    with pytest.raises(ValueError, match="apply: the module has moved its buffer 'kept' to another value") as caught:
        step(state, batch(rank))
    assert (state.extra["carry"]["kept"].abs() == 1).all()
    return str(caught.value)


@in_turns(5)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("move", APART)
def test_a_buffer_that_each_rank_moves_by_its_own_batch(move: str, wrap: str) -> None:
    one, other = run_ranks(functools.partial(refused, move=move, wrap=wrap), 2)
    assert one == other


@in_turns(2)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("move", ALIKE)
def test_a_buffer_that_all_ranks_move_alike(move: str, wrap: str) -> None:
    def on(rank: int) -> Any:
        step, params = step_of(Moving(ALIKE[move]), WRAPS[wrap])
        state, _ = step(step.init(params), batch(rank))
        return state.extra["carry"]

    one, other = run_ranks(on, 2)
    torch.testing.assert_close(dict(one), dict(other), rtol=0, atol=0, equal_nan=True)


def test_each_rank_may_have_its_own_where_nothing_says_otherwise() -> None:
    """Batch norms are over all ranks by themselves then."""

    def on(rank: int) -> Any:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(Moving(by_hand))
        step, params = step_of(module, fz.shard_zero3, sync=False)
        state, _ = step(step.init(params), batch(rank))
        return state.extra["carry"]

    one, other = run_ranks(on, 2)
    assert not torch.equal(one.pop("kept"), other.pop("kept"))
    assert_trees_equal(one, other)


def sent(module: nn.Module) -> list[int]:
    """The exchanges of a forward run on each of two ranks."""

    def on(rank: int) -> int:
        step, params = step_of(module, fz.shard_zero1)
        state = step.init(params)
        with recorded_collectives() as record:
            step.forward(state, batch(rank))
        return sum("buffers" in str(tag) for _, tag, _ in record)

    return run_ranks(on, 2)


def test_nothing_is_sent_where_batch_norms_have_all_buffers() -> None:
    assert sent(nn.Sequential(nn.Linear(D, D, dtype=F64), nn.BatchNorm1d(D, dtype=F64))) == [0, 0]
    assert sent(Moving(untouched)) == [1, 1]
    assert sent(Moving(untouched).eval()) == [0, 0]


def test_members_of_an_ensemble_and_runs_outside_of_a_step() -> None:
    def on(rank: int) -> None:
        step, params = step_of(Moving(iterated), lambda step: step)
        states = fz.stack([step.init(params) for _ in range(2)])
        torch.vmap(step, in_dims=(0, None))(states, batch(rank))
        apply, params, buffers = fz.functional(Moving(by_hand), buffers=True, sync_batch_norm=True)
        apply(params, buffers, batch(rank))  # of this process alone

    run_ranks(on, 2)
