"""Pullbacks in two halves where leaves are cut over a tensor axis, of any model, against pullbacks as a whole."""

from __future__ import annotations

from typing import Any

import pytest
import test_shard_tensor as functions
import torch
import zoo
from halved import compare
from hypothesis import given
from hypothesis import strategies as st
from test_derivatives_of_slices import Blocks, common, transformed

import fzero as fz
from fzero.testing import run_ranks

pytestmark = pytest.mark.usefixtures("hazards")


@given(layers=functions.drawn_layers, **common)
def test_functions(layers: Any, sizes: tuple[int, int], stage: int, others: tuple[str, ...]) -> None:
    layers = layers if functions.plan_of(layers) else (*layers, ("mlp", 5))
    sizes = sizes if stage else (1, sizes[1])

    def rank_main(rank: int) -> None:
        mesh = functions.meshed(sizes)
        loss, params = functions.model(layers)
        ax = fz.parallel.axis(mesh, "tp")
        step = fz.train_step(lambda p, x: loss(p, x, ax), fz.sgd(0.1))
        step = transformed(step, mesh, functions.plan_of(layers), stage, False, others)
        compare(step, params, functions.batches(sizes[0])[rank // sizes[1]])

    run_ranks(rank_main, sizes[0] * sizes[1])


class Fed(zoo.Model):
    def forward(self, tokens: torch.Tensor, more: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.embedding(tokens) + more
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@given(
    blocks=zoo.drawn_blocks,
    tied=st.booleans(),
    sequence=st.booleans(),
    **common,
)
def test_modules(
    blocks: Blocks, tied: bool, sequence: bool, sizes: tuple[int, int], stage: int, others: tuple[str, ...]
) -> None:
    sizes = sizes if stage else (1, sizes[1])
    plain = zoo.made(blocks, tied)
    fed = Fed(blocks, tied).double()
    fed.load_state_dict(plain.state_dict())
    apply, params = fz.functional(fed)
    plan = {**plain.plan([True] * len(blocks)), "embedding": "vocabulary"}
    more = torch.randn(2, 5, zoo.WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def rank_main(rank: int) -> None:
        tokens, targets = zoo.batches(sizes[0])[rank // sizes[1]]

        def loss(p: Any, tokens: torch.Tensor, targets: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(apply(p, tokens, more).flatten(0, 1), targets.flatten())

        step = transformed(fz.train_step(loss, fz.sgd(0.1)), functions.meshed(sizes), plan, stage, sequence, others)
        compare(step, params, [tokens, targets, more])

    run_ranks(rank_main, sizes[0] * sizes[1])
