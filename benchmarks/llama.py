"""A small Llama, each of whose linear layers is its own: as a module, and as a pure function with maps between ranks.

Shapes: b examples, t positions, h heads, d features of one head.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from transformer import rotate

import fzero as fz

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [b, h, t, d], k and v [b, kv_heads, t, d] -> [b, h, t, d]


@dataclass(frozen=True)
class Sizes:
    width: int
    blocks: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def d(self) -> int:
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        return 32 * (self.width // 12)  # about 8 / 3 of the width, and a multiple of all numbers of ranks


def rotary(sizes: Sizes, places: Tensor) -> Tensor:
    """The angles of places in the whole sequence: [t, d / 2]."""
    frequencies = 10_000.0 ** -(torch.arange(0, sizes.d, 2) / sizes.d)
    return torch.outer(places, frequencies)


def heads_of(x: Tensor, d: int) -> Tensor:
    """[b, t, h * d] -> [b, h, t, d], of as many heads as there are."""
    return x.unflatten(-1, (-1, d)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes, attend: Attend) -> None:
        super().__init__()
        self.d, self.attend = sizes.d, attend
        self.q = nn.Linear(sizes.width, sizes.heads * sizes.d, bias=False)
        self.k = nn.Linear(sizes.width, sizes.kv_heads * sizes.d, bias=False)
        self.v = nn.Linear(sizes.width, sizes.kv_heads * sizes.d, bias=False)
        self.o = nn.Linear(sizes.heads * sizes.d, sizes.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = heads_of(self.q(x), self.d), heads_of(self.k(x), self.d), heads_of(self.v(x), self.d)
        return self.o(self.attend(rotate(q, angles), rotate(k, angles), v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes, attend: Attend) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)
        self.attention, self.mlp = Attention(sizes, attend), Mlp(sizes)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Tokens [b, t] and the angles of their places [t, d / 2] -> logits [b, t, vocabulary].

    The number of heads is that of what the linear layers put out: with slices of them it computes some heads.
    """

    def __init__(self, sizes: Sizes, attend: Attend, seed: int = 0) -> None:
        super().__init__()
        self.sizes = sizes
        generator = torch.Generator().manual_seed(seed)
        with torch.device("meta"):  # nn.Linear would draw from the global generator
            self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
            self.blocks = nn.ModuleList(Block(sizes, attend) for _ in range(sizes.blocks))
            self.norm = nn.RMSNorm(sizes.width)
            self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.to_empty(device="cpu")
        with torch.no_grad():
            for param in self.parameters():
                if param.ndim == 1:
                    param.fill_(1.0)
                else:
                    param.normal_(std=param.shape[1] ** -0.5, generator=generator)

    def forward(self, tokens: Tensor, angles: Tensor) -> Tensor:
        x = self.embed(tokens).to(self.norm.weight.dtype)  # the residual stream is as precise as the norms
        for block in self.blocks:
            x = block(x, angles)
        return self.head(self.norm(x))


def pure(sizes: Sizes, attend: Attend, ax: Any, starts: Sequence[int]) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """The same as a function of params of which this rank has slices; it says where ranks exchange values.

    Args:
        starts: where each rank's rows of the embedding begin.
    """

    def norm(x: Tensor, p: Any) -> Tensor:
        return F.rms_norm(x, (sizes.width,), p["weight"])

    @fz.unit
    def block(p: Any, x: Tensor, angles: Tensor) -> Tensor:
        own = p["attention"]
        h = fz.parallel.copy(norm(x, p["attention_norm"]), ax)
        q, k, v = [heads_of(F.linear(h, own[name]["weight"]), sizes.d) for name in "qkv"]
        out = attend(rotate(q, angles), rotate(k, angles), v).transpose(1, 2).flatten(2)
        x = x + fz.parallel.sum(F.linear(out, own["o"]["weight"]), ax)
        own = p["mlp"]
        h = fz.parallel.copy(norm(x, p["mlp_norm"]), ax)
        h = F.silu(F.linear(h, own["gate"]["weight"])) * F.linear(h, own["up"]["weight"])
        return x + fz.parallel.sum(F.linear(h, own["down"]["weight"]), ax)

    def apply(params: Any, tokens: Tensor, angles: Tensor) -> Tensor:
        first, last = starts[ax.rank : ax.rank + 2]
        inside = (tokens >= first) & (tokens < last)
        found = F.embedding(torch.where(inside, tokens - first, 0), params["embed"]["weight"])
        x = fz.parallel.sum(found.masked_fill(~inside[..., None], 0.0), ax).float()
        for p in params["blocks"]:
            x = block(p, x, angles)
        return F.linear(fz.parallel.copy(norm(x, params["norm"]), ax), params["head"]["weight"])

    return apply
