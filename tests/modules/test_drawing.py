"""Dropout in modules whose leaves are cut: other numbers on each rank where values vary, the same where they do not."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nightly import in_turns
from torch import nn

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

F64, WIDTH = torch.float64, 8


class Drops(nn.Module):
    """Drops what is whole, what is a slice, and what is whole again; what it dropped is in the outputs."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.before, self.inside, self.after = nn.Dropout(p), nn.Dropout(p), nn.Dropout(p)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.up(self.before(x)))
        kept = self.inside(hidden)
        seen = self.inside(hidden.flatten(0, -2)).view(hidden.shape)  # by views, too
        out = x + self.after(self.down(kept + seen))
        return self.norm(out), kept.detach() == 0


class Stack(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Drops(p) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> Any:
        masks = []
        for block in self.blocks:
            x, mask = block(x)
            masks.append(mask)
        return x, masks


PLAN = {"*.up": "column", "*.down": "row"}


def train(rank: int, module: nn.Module, sequence: bool, remat: bool) -> Any:
    apply, params = fz.functional(module)

    def loss(params: Any, x: torch.Tensor) -> Any:
        out, masks = apply(params, x)
        return (out * x.cos()).mean(), (out, masks)

    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    step = fz.train_step(loss, fz.adamw(1e-2), has_aux=True)
    step = fz.shard_zero3(fz.shard_tensor(step, PLAN, mesh=mesh, sequence=sequence), mesh=mesh)
    step = fz.remat(step) if remat else step
    state, masks, outs = step.init(params), [], []
    generator = torch.Generator().manual_seed(rank // 2)
    x = torch.randn(3, 5, WIDTH, dtype=F64, generator=generator)
    for _ in range(2):
        state, metrics = step(state, x)
        out, mask = metrics["aux"]
        masks.append(mask)
        outs.append(out)
    return dict(fz.gather(state.params)), masks, outs


@in_turns(2)
@pytest.mark.parametrize("sequence", [False, True])
def test_what_varies_is_dropped_by_each_rank_for_itself(sequence: bool) -> None:
    torch.manual_seed(0)
    run = functools.partial(train, module=Stack(0.5).to(F64), sequence=sequence)
    runs = {remat: run_ranks(functools.partial(run, remat=remat), 4) for remat in (False, True)}
    for ranks in (runs[False], runs[True]):
        for a, b in ((0, 1), (2, 3)):  # of one data rank
            assert all(map(torch.equal, ranks[a][2], ranks[b][2]))  # what is whole is the same
            for first, second in zip(ranks[a][1], ranks[b][1], strict=True):
                assert not any(map(torch.equal, first, second))  # slices are dropped each by themselves
                assert all(0.2 < mask.double().mean() < 0.8 for mask in (*first, *second))
        assert not any(map(torch.equal, ranks[0][2], ranks[2][2]))  # data ranks draw otherwise
    for whole, again in zip(runs[False], runs[True], strict=True):
        assert_trees_close(whole[0], again[0], rtol=1e-12, atol=1e-12)
        assert all(map(torch.equal, whole[2], again[2]))


def test_the_functions_of_attention() -> None:
    """torch's attention draws inside."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_dropout = 0.5
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> Any:
            q = self.up(x).unflatten(-1, (-1, 2)).transpose(1, 2)
            out = F.scaled_dot_product_attention(q * 0, q * 0, torch.ones_like(q), dropout_p=self.attention_dropout)
            return self.down(out.transpose(1, 2).flatten(-2)), out

    torch.manual_seed(0)
    apply, params = fz.functional(Attention())

    def run(rank: int) -> Any:
        step = fz.train_step(lambda p, x: (apply(p, x)[0].mean(), apply(p, x)[1]), fz.sgd(0.1), has_aux=True)
        step = fz.shard_tensor(step, {"up": "column", "down": "row"})
        return step(step.init(params), torch.ones(2, 6, 4))[1]["aux"]

    first, second = run_ranks(run, 2)
    assert first.shape == second.shape and not torch.equal(first, second)
