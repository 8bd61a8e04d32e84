"""A small language model of drawn blocks, each of which tensor parallelism cuts in another way."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

import fzero as fz

F64 = torch.float64
WIDTH, VOCABULARY = 6, 11


class Mlp(nn.Module):
    plan: ClassVar = {"first": "column", "second": "row"}

    def __init__(self, inner: int, bias: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, inner, bias=bias), nn.Linear(inner, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Gathered(nn.Module):
    """Outputs that are joined, and inputs that are cut."""

    plan: ClassVar = {"first": "column_gather", "second": "row"}

    def __init__(self, inner: int, bias: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, inner, bias=bias), nn.Linear(inner, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.softmax(self.first(x), -1))


class Fused(nn.Module):
    """Gate and up in one layer."""

    def __init__(self, inner: int, bias: bool) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 2 * inner, bias=bias), nn.Linear(inner, WIDTH, bias=bias)
        self.plan = {"both": fz.parallel.cut("column", parts=(inner, inner)), "down": "row"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(torch.sigmoid(gate) * up)


class Attention(nn.Module):
    """Heads as Hugging Face writes them, with fewer of keys and values."""

    plan: ClassVar = {"q_proj": "column", "k_proj": "column", "v_proj": "column", "out": "row"}

    def __init__(self, inner: int, bias: bool) -> None:
        super().__init__()
        self.head_dim, keys = 2, 1 + inner % 3
        self.num_key_value_groups = 4 // keys if keys != 3 else 2
        heads = keys * self.num_key_value_groups
        self.q_proj = nn.Linear(WIDTH, heads * 2, bias=bias)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, keys * 2, bias=bias), nn.Linear(WIDTH, keys * 2, bias=bias)
        self.out = nn.Linear(heads * 2, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (each.repeat_interleave(self.num_key_value_groups, 1) for each in (k, v))
        weights = torch.softmax(q @ k.transpose(-1, -2) / 2**0.5, -1)
        return self.out((weights @ v).transpose(1, 2).flatten(-2))


class Convolution(nn.Module):
    plan: ClassVar = {"first": "column", "second": "row"}

    def __init__(self, inner: int, bias: bool) -> None:
        super().__init__()
        inner = max(inner, 4)  # as many channels as ranks
        self.first = nn.Conv1d(WIDTH, inner, 3, padding=1, bias=bias)
        self.second = nn.Conv1d(inner, WIDTH, 1, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x.transpose(1, 2)))).transpose(1, 2)


class Norm(nn.Module):
    plan: ClassVar = {}

    def __init__(self, inner: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Mlp, Gathered, Fused, Attention, Convolution, Norm)}
drawn_blocks = st.lists(
    st.tuples(st.sampled_from(sorted(KINDS)), st.integers(2, 7), st.booleans()), min_size=1, max_size=2
).map(tuple)


class Scaled(nn.Embedding):
    """As those of Gemma and Bart are."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * torch.tensor(1.5).to(self.weight.dtype)


class Model(nn.Module):
    """Embedding, blocks with residuals, and a head that may be tied to the embedding."""

    def __init__(self, blocks: tuple[tuple[str, int, bool], ...], tied: bool, scaled: bool = False) -> None:
        super().__init__()
        self.embedding = (Scaled if scaled else nn.Embedding)(VOCABULARY, WIDTH, padding_idx=3)
        self.blocks = nn.ModuleList([KINDS[kind](inner, bias) for kind, inner, bias in blocks])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def plan(self, chosen: list[bool]) -> dict[str, Any]:
        """The plans of the chosen blocks."""
        out: dict[str, Any] = {}
        for number, block in enumerate(self.blocks):
            if chosen[number]:
                out |= {f"blocks.{number}.{name}": how for name, how in block.plan.items()}  # type: ignore[union-attr]
        return out


def made(blocks: tuple[tuple[str, int, bool], ...], tied: bool, scaled: bool = False) -> Model:
    """The same values whatever was drawn before."""
    model, generator = Model(blocks, tied, scaled).to(F64), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, dtype=F64, generator=generator) * 0.4)
    return model


@st.composite
def planned(draw: st.DrawFn) -> tuple[Model, dict[str, Any]]:
    """A model of up to three blocks, and a plan of some of its leaves."""
    kind = st.tuples(st.sampled_from(sorted(KINDS)), st.integers(2, 7), st.booleans())
    blocks, tied = draw(st.lists(kind, min_size=1, max_size=3).map(tuple)), draw(st.booleans())
    model = made(blocks, tied, scaled=draw(st.booleans()))
    embedding = draw(st.sampled_from(["vocabulary", "column_gather", None]))
    plan = {**model.plan([draw(st.booleans()) for _ in blocks]), **({} if tied else {"head": "column_gather"})}
    if embedding is not None:
        plan["embedding"] = embedding
    return model, plan or {"head": "column_gather"}


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(6)
    return [tuple(torch.randint(0, VOCABULARY, (2, 2, 5), generator=generator)) for _ in range(count)]  # type: ignore[misc]


def loss_of(apply: Any) -> Any:
    return functools.partial(_loss, apply)


def _loss(apply: Any, params: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(apply(params, tokens).flatten(0, 1), targets.flatten())
