"""Models that every path is held against: uneven sizes, a tied weight, units of both kinds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fzero as fz

F64 = torch.float64
BLOCKS = ("blocks.0.*", "blocks.1.*|blocks.2.*")  # patterns of units of every scenario


class Block(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.up = nn.Linear(width, width + 3, dtype=dtype)
        self.down = nn.Linear(width + 3, width, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class TinyLM(nn.Module):
    """Embedding, blocks and a head tied to the embedding; odd sizes, an unused parameter."""

    def __init__(self, width: int = 7, blocks: int = 3, vocabulary: int = 11, dtype: torch.dtype = F64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, dtype=dtype)
        self.blocks = nn.ModuleList(Block(width, dtype) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(5, dtype=dtype))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tiny_module(seed: int = 0, **sizes: Any) -> TinyLM:
    """The same for every caller."""
    with torch.device("meta"):
        module = TinyLM(**sizes)
    module = module.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(0.4 * torch.randn(param.shape, generator=generator, dtype=F64))
    return module


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tiny_lm(seed: int = 0, **sizes: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """(loss function of (params, tokens, targets), params)."""
    apply, params = fz.functional(tiny_module(seed, **sizes))

    def loss(params: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_of(apply(params, tokens), targets)

    return loss, params


def token_batches(ranks: int, size: int = 4, length: int = 5, vocabulary: int = 11, seed: int = 1) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, vocabulary, (ranks, 2, size, length), generator=generator)
    return [(pair[0], pair[1]) for pair in data]


def _affine(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"] + p["b"])


def stack(seed: int = 0, blocks: int = 3, width: int = 5, dtype: torch.dtype = F64) -> tuple[Any, Any]:
    """(loss function of (params, x, y), params): a pure function over nested containers, with `fz.unit`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=F64).to(dtype)

    params = {
        "blocks": [{"w": draw(width, width), "b": draw(width)} for _ in range(blocks)],
        "head": {"w": draw(width, 2), "b": draw(2)},
    }
    block = fz.unit(_affine)

    def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for p in params["blocks"]:
            x = block(p, x)
        return ((x @ params["head"]["w"] + params["head"]["b"] - y) ** 2).mean()

    return loss, params


def vector_batches(ranks: int, size: int = 4, width: int = 5, seed: int = 1, dtype: torch.dtype = F64) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, width, generator=generator, dtype=F64).to(dtype),
            torch.randn(size, 2, generator=generator, dtype=F64).to(dtype),
        )
        for _ in range(ranks)
    ]
