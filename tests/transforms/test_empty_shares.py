"""A rank without examples: the numbers are those of the others, and nobody waits."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

F64 = torch.float64
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


class Attention(nn.Module):
    def __init__(self, width: int, mapped: bool) -> None:
        super().__init__()
        self.mapped = mapped
        self.norm, self.qkv = nn.LayerNorm(width, dtype=F64), nn.Linear(width, 3 * width, dtype=F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        if self.mapped:  # torch maps no kernel of attention over examples
            own = torch.softmax(q @ k.mT, -1) @ v
        else:
            own = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + own.transpose(1, 2).flatten(-2)


class Model(nn.Module):
    def __init__(self, mapped: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, dtype=F64)
        self.blocks = nn.ModuleList([Attention(6, mapped), Attention(6, mapped)])
        self.head = nn.Linear(6, 11, dtype=F64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(mapped: bool = False) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    module = Model(mapped)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=F64) / 2)
    apply, params = fz.functional(module)
    tokens, targets = torch.randint(0, 11, (2, 3, 5), generator=generator)
    targets[0, 2:] = -100
    return apply, params, tokens, targets


def token_mean(p: Any, tokens: torch.Tensor, targets: torch.Tensor, apply: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(apply(p, tokens).flatten(0, 1), targets.flatten())


def counted(_: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (targets != -100).sum()


def test_of_one_mean_over_all_ranks() -> None:
    apply, params, tokens, targets = made()
    grads, want = torch.func.grad_and_value(functools.partial(token_mean, apply=apply))(params, tokens, targets)

    def rank_main(rank: int) -> None:
        ax = fz.parallel.axis(None, "dp")

        def loss(p: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            each = nn.functional.cross_entropy(apply(p, tokens).flatten(0, 1), targets.flatten(), reduction="none")
            return fz.parallel.weighted_mean(each, targets.flatten() != -100, ax)

        step = fz.shard_zero3(fz.train_step(loss, fz.sgd(1.0)))
        own = (tokens, targets) if rank else (tokens[:0], targets[:0])
        state = step.init(params)
        new, metrics = step(state, *own)
        assert_trees_close([metrics["loss"], step.forward(state, *own)], [want, want], **CLOSE)
        full = dict(fz.gather(new.params))
        assert_trees_close(full, {name: p - grads[name] for name, p in params.items()}, **CLOSE)

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_gradients_of_no_examples(backend: str) -> None:
    run_ranks(_no_examples, 2, backend=backend, timeout=30)


def _no_examples(rank: int) -> None:
    apply, params, tokens, targets = made(mapped=True)

    def loss(p: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return apply(p, tokens).square().sum() * (1 + 0 * targets.sum())

    step = fz.shard_zero3(fz.train_step(loss, fz.sgd(1.0)))
    state, kept = step.init(params), "embed.*|blocks.0.qkv.*"
    found = fz.per_example_grads(step, state, tokens[: 3 * rank], targets[: 3 * rank], only=kept)
    for name, grad in found.items():
        if not name.startswith(("embed", "blocks.0.qkv")):
            assert grad is None
            continue
        assert grad.shape == (3 * rank, *params[name].shape) and grad.dtype == F64
        for own, x, y in zip(grad, tokens, targets, strict=False):
            want = torch.func.grad(loss)(params, x[None], y[None])[name]
            assert_trees_close(own, want, **CLOSE)


def test_inputs_that_do_not_split_on_one_rank_are_refused_on_all() -> None:
    apply, params, x, y = made()
    loss = functools.partial(token_mean, apply=apply)

    def rank_main(rank: int) -> None:
        step = fz.accumulate(fz.shard_zero3(fz.train_step(loss, fz.sgd(1.0))), 2, weights=counted)
        pipe = fz.pipeline(
            [fz.shard_zero3(fz.train_step(loss, fz.sgd(1.0)))],
            fz.schedules.gpipe(stages=1, microbatches=2),
            weights=counted,
            inputs={0: (0, 1)},
        )
        verbs: list[tuple[Any, Any]] = [(step, step.init(params)), (pipe, pipe.init([params]))]
        for of, state in verbs:
            for call in (of, of.vjp, of.forward):
                with pytest.raises(ValueError, match=r"got 3 in input 0, 2 in input 1 along the dims that are split"):
                    call(state, x, y[: 2 + (not rank)])

    run_ranks(rank_main, 2)
