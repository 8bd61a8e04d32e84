"""A vision transformer over patches of images of any sizes, and a Llama-like decoder whose prefix they are.

Both are plain modules, which know nothing of ranks, and compute nothing for padding: the patches of all images stand
one after the other, and so do all examples' patches and characters; none sees another example's. Shapes: n rows of all
examples, h heads, d features of one head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from line_images import CHARACTER, PATCH
from torch import Tensor, nn
from transformer import SwiGLU, rotate

import fzero as fz

VOCABULARY = 128  # ASCII
PERIOD = 100.0  # of the slowest rotation, in characters
Attend = Callable[..., Tensor]  # as fz.parallel.attention


class Attention(nn.Module):
    """With the names and numbers of a Llama, by which its heads are dealt out to tensor ranks."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.head_dim, self.num_key_value_groups = width // heads, groups
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width // groups, bias=False)
        self.v_proj = nn.Linear(width, width // groups, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        q, k, v = (self.heads(own(x)) for own in (self.q_proj, self.k_proj, self.v_proj))
        y = attend(rotate(q, angles), rotate(k, angles), v)
        return self.o_proj(rearrange(y, "1 h n d -> n (h d)"))

    def heads(self, x: Tensor) -> Tensor:
        return rearrange(x, "n (h d) -> 1 h n d", d=self.head_dim)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads, groups)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = SwiGLU(width)

    def forward(self, x: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles, attend)
        return x + self.mlp(self.mlp_norm(x))


class VisionTransformer(nn.Module):
    """Images of `line_images.Batch` -> of each patch "embeddings" [n, width] and "places" [n], the x.

    Args:
        attention: of all images' patches, of which this rank may have some: `fz.parallel.ulysses(None, sp)`.
    """

    def __init__(
        self, width: int, blocks: int, heads: int, generator: torch.Generator, attention: Attend = fz.parallel.attention
    ) -> None:
        super().__init__()
        self.attention, self.pairs = attention, width // heads // 2
        with torch.device("meta"):
            self.embed = nn.Linear(PATCH * PATCH, width, bias=False)
            self.place = nn.Linear(2 * self.pairs, width, bias=False)
            self.blocks = nn.ModuleList(Block(width, heads, 1) for _ in range(blocks))
            self.norm = nn.RMSNorm(width)
        draw(self, generator)

    def forward(self, images: fz.Ragged) -> fz.Ragged:
        places = images.values["places"]
        # half of the rotations turn with x, half with y
        angles = rotations(places, -(-self.pairs // 2)).flatten(1)[:, : self.pairs]
        attend = functools.partial(self.attention, documents=starts(images.lengths))
        x = self.embed(images.values["patches"]) + self.place(torch.cat([angles.sin(), angles.cos()], -1))
        for block in self.blocks:
            x = block(x, angles, attend)
        return fz.Ragged({"embeddings": self.norm(x), "places": places[:, 0]}, images.lengths)


class Decoder(nn.Module):
    """Characters [n], those of each line behind its image's embeddings -> logits of the next ones, [n, VOCABULARY]."""

    def __init__(self, width: int, blocks: int, heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self.pairs = width // heads // 2
        with torch.device("meta"):
            self.embed = nn.Embedding(VOCABULARY, width)
            self.blocks = nn.ModuleList(Block(width, heads, 2) for _ in range(blocks))
            self.norm = nn.RMSNorm(width)
            self.head = nn.Linear(width, VOCABULARY, bias=False)
        draw(self, generator)

    def forward(self, tokens: fz.Ragged, images: fz.Ragged) -> Tensor:
        of_patches, of_characters = [torch.repeat_interleave(each.lengths) for each in (images, tokens)]  # examples
        order = torch.cat([of_patches, of_characters]).argsort(stable=True)
        # characters are counted anew, so that each is about as far from its own patches wherever it stands
        counted = torch.arange(len(of_characters)) - (tokens.lengths.cumsum(0) - tokens.lengths)[of_characters]
        angles = rotations(torch.cat([images.values["places"], CHARACTER * counted])[order], self.pairs)
        documents = starts(images.lengths + tokens.lengths)
        attend = functools.partial(fz.parallel.attention, is_causal=True, documents=documents)
        x = torch.cat([images.values["embeddings"], self.embed(tokens.values)])[order]
        for block in self.blocks:
            x = block(x, angles, attend)
        return self.head(self.norm(x[order >= len(of_patches)]))


def starts(lengths: Tensor) -> list[int]:
    """Where the rows of each example begin, and where the last ones end."""
    return [0, *lengths.cumsum(0).tolist()]


def rotations(places: Tensor, pairs: int) -> Tensor:
    """The angle of each place and pair of features: [..., pairs]."""
    return places[..., None] / CHARACTER * PERIOD ** -(torch.arange(pairs) / pairs)


def draw(module: nn.Module, generator: torch.Generator) -> None:
    """Gives a module memory and its first weights."""
    module.to_empty(device="cpu")
    for param in module.parameters():
        if param.ndim == 1:
            nn.init.ones_(param)
        else:
            nn.init.normal_(param, std=param.shape[1] ** -0.5, generator=generator)


def loss_of(logits: Tensor, tokens: fz.Ragged) -> Tensor:
    """Nats per character: the mean over lines of each line's own, so that the mean over shares of a batch is its."""
    targets = tokens.values.roll(-1).index_fill(0, last_rows(tokens), -100)  # which cross_entropy leaves out
    losses = F.cross_entropy(logits, targets, reduction="none")
    return (losses / torch.repeat_interleave(tokens.lengths - 1, tokens.lengths)).sum() / len(tokens.lengths)


def last_rows(examples: fz.Ragged) -> Tensor:
    """The number of each example's last row."""
    return examples.lengths.cumsum(0) - 1
