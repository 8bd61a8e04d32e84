"""A vision transformer over packed patches of images of any sizes, and a Llama-like decoder whose prefix they are.

Both are plain modules, which know nothing of ranks; the vision transformer is told who has which patches. Shapes: b
examples, n patches of an image with padding, t characters, h heads, d features of one head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from line_images import CHARACTER, NOWHERE, PAD, PATCH
from torch import Tensor, nn
from transformer import SwiGLU, rotate

import fzero as fz

VOCABULARY = 128  # ASCII
PERIOD = 100.0  # of the slowest rotation, in characters
Image = dict[str, Tensor]  # "embeddings" [b, n, width] and "places" [b, n]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


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
        return self.o_proj(rearrange(y, "b h t d -> b t (h d)"))

    def heads(self, x: Tensor) -> Tensor:
        return rearrange(x, "b t (h d) -> b h t d", d=self.head_dim)


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
    """Images of `line_images.Batch` -> their embeddings, [b, n, width], and where by characters these are, [b, n].

    Patches of all images stand one after the other, so that none is computed for padding, and each sees those of its
    own image.

    Args:
        sp: of `fz.parallel.axis`, over whose ranks patches are cut; None for none.
    """

    def __init__(self, width: int, blocks: int, heads: int, generator: torch.Generator, sp: Any = None) -> None:
        super().__init__()
        self.sp, self.pairs = sp, width // heads // 2
        self.attention = fz.parallel.attention if sp is None else fz.parallel.ulysses(None, sp)
        with torch.device("meta"):
            self.embed = nn.Linear(PATCH * PATCH, width, bias=False)
            self.place = nn.Linear(2 * self.pairs, width, bias=False)
            self.blocks = nn.ModuleList(Block(width, heads, 1) for _ in range(blocks))
            self.norm = nn.RMSNorm(width)
        draw(self, generator)

    def forward(self, images: dict[str, Tensor]) -> Image:
        seen = images["places"][..., 0] != NOWHERE
        ends = seen.sum(1).cumsum(0).tolist()
        attend = functools.partial(self.attention, documents=[0, *ends])  # none sees another
        patches, places = (self.split(images[name][seen]) for name in ("patches", "places"))
        # half of the rotations turn with x, half with y
        angles = rotations(places, -(-self.pairs // 2)).flatten(1)[:, : self.pairs]
        x = self.embed(patches) + self.place(torch.cat([angles.sin(), angles.cos()], -1))
        for block in self.blocks:
            x = block(x[None], angles, attend)[0]
        packed = self.gather(self.norm(x))
        embeddings = packed.new_zeros(*seen.shape, packed.shape[1]).masked_scatter(seen[..., None], packed)
        return {"embeddings": embeddings, "places": images["places"][..., 0]}

    def split(self, x: Tensor) -> Tensor:
        """This rank's share of all patches, which need not be equal ones."""
        return x if self.sp is None else fz.parallel.split(x, self.sp, 0)

    def gather(self, x: Tensor) -> Tensor:
        return x if self.sp is None else fz.parallel.gather(x, self.sp, 0)


class Decoder(nn.Module):
    """Characters [b, t] behind an image's embeddings -> logits of the next ones, [b, t, VOCABULARY]."""

    def __init__(self, width: int, blocks: int, heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self.pairs = width // heads // 2
        with torch.device("meta"):
            self.embed = nn.Embedding(VOCABULARY, width)
            self.blocks = nn.ModuleList(Block(width, heads, 2) for _ in range(blocks))
            self.norm = nn.RMSNorm(width)
            self.head = nn.Linear(width, VOCABULARY, bias=False)
        draw(self, generator)

    def forward(self, tokens: Tensor, image: Image) -> Tensor:
        n, t = image["places"].shape[1], tokens.shape[1]
        # characters are counted anew, so that each is about as far from its own patches wherever it stands
        places = torch.cat([image["places"], CHARACTER * torch.arange(t).expand(tokens.shape)], 1)
        there = torch.cat([image["places"] != NOWHERE, tokens != PAD], 1)
        sees = torch.ones(n + t, n + t, dtype=torch.bool).tril() & there[:, None] | torch.eye(n + t, dtype=torch.bool)
        attend = functools.partial(F.scaled_dot_product_attention, attn_mask=sees[:, None], enable_gqa=True)
        x, angles = torch.cat([image["embeddings"], self.embed(tokens)], 1), rotations(places, self.pairs)[:, None]
        for block in self.blocks:
            x = block(x, angles, attend)
        return self.head(self.norm(x[:, n:]))


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


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats per character: the mean over lines of each line's own, so that the mean over shares of a batch is its."""
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="none")
    return (losses.view(targets.shape).sum(1) / (targets != PAD).sum(1)).mean()
