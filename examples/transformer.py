"""A decoder-only transformer over bytes: RMSNorm, rotary positions, SwiGLU. A plain nn.Module; nothing here is sharded.

What has a name (`fz.name`) may be kept where a step recomputes the blocks; otherwise a name does nothing.

Shapes: b examples, t positions, h heads, d features of one head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import fzero as fz

VOCABULARY = 256


def rotary_angles(length: int, features: int, device: torch.device) -> Tensor:
    """The angle of each position and pair of features (RoFormer, arXiv 2104.09864): [t, d / 2]."""
    frequencies = 10_000.0 ** -(torch.arange(0, features, 2, device=device) / features)
    return torch.outer(torch.arange(length, device=device), frequencies)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turns each pair of features by its position's angle: [b, h, t, d] -> the same."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = rearrange(fz.name(self.qkv(x), "qkv"), "b t (three h d) -> three b h t d", three=3, h=self.heads)
        y = F.scaled_dot_product_attention(rotate(q, angles), rotate(k, angles), v, is_causal=True)
        return self.out(rearrange(y, "b h t d -> b t (h d)"))


class SwiGLU(nn.Module):
    """arXiv 2002.05202; the hidden width keeps the size of the usual four-fold layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 8 * width // 3
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(fz.name(self.gate(x), "gate")) * fz.name(self.up(x), "up"))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = SwiGLU(width)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = fz.name(x + self.attention(self.attention_norm(x), angles), "attended")
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Bytes [b, t] -> logits of the next byte [b, t, 256].

    Args:
        width: features of the residual stream, a multiple of 2 * heads.
        blocks: number of transformer blocks.
        heads: attention heads of each block.
        generator: draws the weights; without one they have shapes and no memory (device "meta").
    """

    def __init__(self, width: int, blocks: int, heads: int, generator: torch.Generator | None) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"Transformer: got width={width}, expected a multiple of 2 * heads = {2 * heads}.")
        self.rotated = width // heads
        with torch.device("meta"):  # nn.Linear would draw from the global generator
            self.embed = nn.Embedding(VOCABULARY, width)
            self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
            self.norm = nn.RMSNorm(width)
            self.head = nn.Linear(width, VOCABULARY, bias=False)
        if generator is not None:
            self.to_empty(device="cpu")
            for name, param in self.named_parameters():
                self.draw(name, param, generator)

    def draw(self, name: str, param: Tensor, generator: torch.Generator) -> Tensor:
        """Fills a param. Norms are one; matrices are normal, those that write to the residual stream smaller by its
        depth (GPT-2)."""
        if param.ndim == 1:
            return nn.init.ones_(param)
        std = param.shape[1] ** -0.5
        if name.endswith(("out.weight", "down.weight")):
            std /= (2 * len(self.blocks)) ** 0.5
        return nn.init.normal_(param, std=std, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        angles = rotary_angles(tokens.shape[1], self.rotated, tokens.device)
        x = self.embed(tokens).to(self.norm.weight.dtype)  # the residual stream is as precise as the norms
        for block in self.blocks:
            x = block(x, angles)
        return self.head(self.norm(x))
