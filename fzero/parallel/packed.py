"""Tensors of several kinds that travel together: token by token, and back, between the ranks of an axis.

What is sent is [tokens, b, numbers]: pieces of a sequence then lie one after the other in memory, and arrive in place.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from fzero.base import private
from fzero.base.node import final
from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.comm.linear import quick
from fzero.engine.compiled import leave_out
from fzero.parallel import maps
from fzero.parallel.types import running
from fzero.parallel.varying import unseen
from fzero.parallel.watched import mapped

Range = tuple[int, int]  # the first of some heads, and the one behind the last


def packed(tensors: Sequence[torch.Tensor], buffer: torch.Tensor | None = None) -> torch.Tensor:
    """Tensors [b, heads, t, d] of one dtype as one buffer [t, b, numbers], a new one or this one."""
    b, _, count, _ = tensors[0].shape
    kinds = [(x.shape[1], x.shape[3]) for x in tensors]
    if buffer is None:
        buffer = tensors[0].new_empty((count, b, sum([heads * d for heads, d in kinds])))
    for view, x in zip(unpacked(buffer, kinds), tensors, strict=True):
        view.copy_(x)
    return buffer


def unpacked(buffer: torch.Tensor, kinds: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """The tensors [b, heads, t, d] of heads and d that are in a buffer, as views of it."""
    views = buffer.split([heads * d for heads, d in kinds], -1)
    return [view.unflatten(-1, kind).permute(1, 2, 0, 3) for view, kind in zip(views, kinds, strict=True)]


def to_heads(
    ax: Axis, lengths: Sequence[int], tensors: Sequence[Sequence[torch.Tensor]], tag: Hashable
) -> list[torch.Tensor]:
    """Exchanges pieces of a sequence for heads: [b, heads of this rank, all tokens, d] of each tensor.

    Args:
        lengths: of the ranks' pieces.
        tensors: for every rank the heads that it gets, [b, its heads, tokens of this rank, d], all of one dtype.
    """
    kinds = [[(x.shape[1], x.shape[3]) for x in each] for each in tensors]
    own, first = kinds[ax.rank], tensors[ax.rank][0]
    whole = first.new_empty((sum(lengths), first.shape[0], sum([heads * d for heads, d in own])))
    receive = whole.split(list(lengths))
    send = [packed(each, receive[rank] if rank == ax.rank else None) for rank, each in enumerate(tensors)]
    tag = f"{tag} of {list(lengths)} tokens to heads {kinds}"
    return unpacked(pieces.fill(ax, whole, send, receive, tag), own)


def to_tokens(
    ax: Axis, lengths: Sequence[int], buffer: torch.Tensor, kinds: Sequence[Sequence[tuple[int, int]]], tag: Hashable
) -> list[list[torch.Tensor]]:
    """The way back: from every rank its heads of each tensor, for this rank's piece of the sequence.

    Args:
        buffer: of `packed`: this rank's heads for all tokens.
        kinds: for every rank the heads and d of each tensor.
    """
    send = buffer.split(list(lengths))
    shapes = [(*send[ax.rank].shape[:2], sum([heads * d for heads, d in kind])) for kind in kinds]
    tag = f"{tag} of {[list(kind) for kind in kinds]} heads to {list(lengths)} tokens"
    came = pieces.exchange(ax, send, shapes, tag)
    return [unpacked(each, kind) for each, kind in zip(came, kinds, strict=True)]


# ---- the same as linear maps, which every derivative goes through


@dataclass(frozen=True, eq=False)
class _Way:
    """Pieces of a sequence to heads, or back, which is its transpose.

    Attributes:
        lengths: of the ranks' pieces.
        sizes: for every rank the number of heads of each tensor.
    """

    ax: Axis
    lengths: Sequence[int]
    sizes: Sequence[Sequence[int]]
    back: bool = False

    def run(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not self.back:
            cut = [x.split([each[place] for each in self.sizes], 1) for place, x in enumerate(tensors)]
            return tuple(to_heads(self.ax, self.lengths, [*zip(*cut, strict=True)], "parallel.ulysses"))
        kinds = [[(size, x.shape[3]) for size, x in zip(each, tensors, strict=True)] for each in self.sizes]
        found = to_tokens(self.ax, self.lengths, packed(tensors), kinds, "parallel.ulysses back")
        return tuple(torch.cat(each, 1) for each in zip(*found, strict=True))

    def transpose(self) -> _Way:
        return replace(self, back=not self.back)


class Folding(torch.autograd.Function):
    """`apply(plan, *tensors) -> tensors`; what is mapped over becomes part of the first dim."""

    @classmethod
    def vmap(cls, info: private.Context, in_dims: Sequence[int | None], plan: object, *tensors: torch.Tensor) -> object:  # type: ignore[override]
        size = info.batch_size
        moved = [
            x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            for dim, x in zip(in_dims[1:], tensors, strict=True)
        ]
        outs: Sequence[torch.Tensor] = cls.apply(plan, *[x.flatten(0, 1) for x in moved])  # type: ignore[assignment]
        return tuple(out.unflatten(0, (size, -1)) for out in outs), (0,) * len(outs)


class _Exchange(Folding):
    @staticmethod
    def forward(way: _Way, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return way.run(*tensors)

    @staticmethod
    def setup_context(ctx: private.Context, inputs: Sequence[object], output: object) -> None:
        ctx.way = inputs[0]

    @staticmethod
    def backward(ctx: private.Context, *cotangents: torch.Tensor) -> object:  # type: ignore[override]
        if final():
            return None, *ctx.way.transpose().run(*map(private.unwrapped, cotangents))
        return None, *_Exchange.apply(ctx.way.transpose(), *cotangents)

    @staticmethod
    def jvp(ctx: private.Context, _: object, *tangents: torch.Tensor) -> object:  # type: ignore[override]
        return _Exchange.apply(ctx.way, *tangents)


_exchange = quick(_Exchange)


def heads_of(
    tensors: Sequence[torch.Tensor], ax: Axis, lengths: Sequence[int], sizes: Sequence[Sequence[int]]
) -> Sequence[torch.Tensor]:
    """[b, heads of all ranks one after the other, tokens of this rank, d] -> [b, heads of this rank, all tokens, d].

    Args:
        lengths: of the ranks' pieces of the sequence.
        sizes: for every rank the number of heads of each tensor.
    """
    if running.get() is not None:  # a dry run, which looks at the maps
        by_tensor = zip(*sizes, strict=True)
        return [maps.all_to_all(x, ax, 1, 2, own, lengths) for x, own in zip(tensors, by_tensor, strict=True)]
    return _exchanged(_Way(ax, lengths, sizes), tensors)


def tokens_of(x: torch.Tensor, ax: Axis, lengths: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The way back: [b, heads of this rank, all tokens, d] -> [b, heads of all ranks, tokens of this rank, d]."""
    if running.get() is not None:
        return maps.all_to_all(x, ax, 2, 1, lengths, sizes)
    return _exchanged(_Way(ax, lengths, [[size] for size in sizes], back=True), [x])[0]


def _exchanged(way: _Way, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    if len({x.dtype for x in tensors}) > 1:  # one message for each
        sizes = [[[own[place]] for own in way.sizes] for place in range(len(tensors))]
        return [_exchanged(replace(way, sizes=own), [x])[0] for own, x in zip(sizes, tensors, strict=True)]
    with unseen():
        outs = _exchange(way, *tensors)
    return [mapped("all_to_all", way.ax, x, out) for x, out in zip(tensors, outs, strict=True)]


leave_out(__name__, "_exchanged")
