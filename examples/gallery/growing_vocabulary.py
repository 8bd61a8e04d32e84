"""A vocabulary grows in the middle of training: old rows keep their moments, and the run goes on, under ZeRO-3.

huggingface/accelerate#2211 and huggingface/transformers#41959 report that DeepSpeed breaks once an embedding or a head
is resized: the new one lacks what ZeRO-3 keeps of each param. Here a state is a value: it is gathered, padded, and cut
anew.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from common import compare, normal
from torch import Tensor

import fzero as fz

WIDTH, OLD, NEW, TOKENS = 8, 10, 13, 12
PHASES = [OLD] * 3 + [NEW] * 3  # the vocabulary in each update


def batch(update: int) -> tuple[Tensor, Tensor]:
    """Tokens, and those that follow them."""
    drawn = torch.Generator().manual_seed(update)
    tokens = torch.randint(PHASES[update], (TOKENS,), generator=drawn)
    return tokens, (tokens + 1) % PHASES[update]


def begun() -> dict[str, Tensor]:
    return {"embed": normal(0, OLD, WIDTH), "hidden": normal(1, WIDTH, WIDTH), "head": normal(2, OLD, WIDTH)}


def grown(leaf: Tensor) -> Tensor:
    """New rows of zeros."""
    return F.pad(leaf, (0, 0, 0, NEW - OLD)) if len(leaf) == OLD else leaf


def loss(params: Mapping[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(torch.tanh(params["embed"][tokens] @ params["hidden"]) @ params["head"].T, targets)


def main(rank: int, ranks: int) -> Mapping[str, Tensor]:
    step = fz.shard_zero3(fz.train_step(loss, fz.adamw(1e-2)))
    state = step.init(begun())
    for update, vocabulary in enumerate(PHASES):
        params, moments = fz.gather(state.params), fz.gather(state.moments)
        if vocabulary != len(params["embed"]):
            for tree in (params, moments.mu, moments.nu):
                tree.update({name: grown(leaf) for name, leaf in tree.items()})
            state = step.init(params, seed=state.seed).replace(moments=moments, step=state.step)
        state, _ = step(state, *[x.chunk(ranks)[rank] for x in batch(update)])
    return fz.gather(state.params)


def plain() -> Mapping[str, Tensor]:
    params = {name: leaf.requires_grad_() for name, leaf in begun().items()}
    optimizer = torch.optim.AdamW(params.values(), lr=1e-2)
    for update, vocabulary in enumerate(PHASES):
        if vocabulary != len(params["embed"]):
            had = {name: optimizer.state[leaf] for name, leaf in params.items()}
            params = {name: grown(leaf.detach()).clone().requires_grad_() for name, leaf in params.items()}
            optimizer = torch.optim.AdamW(params.values(), lr=1e-2)
            for name, leaf in params.items():
                optimizer.state[leaf] = {key: grown(x) if x.ndim else x for key, x in had[name].items()}
        optimizer.zero_grad()
        loss(params, *batch(update)).backward()
        optimizer.step()
    return {name: leaf.detach() for name, leaf in params.items()}


if __name__ == "__main__":
    compare(main, plain)
