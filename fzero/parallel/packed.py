"""Tensors of several kinds that travel together: token by token, and back, between the ranks of an axis.

What is sent is [tokens, b, numbers]: pieces of a sequence then lie one after the other in memory, and arrive in place.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from fzero.comm import pieces
from fzero.comm.axis import Axis

Range = tuple[int, int]  # the first of some heads, and the one behind the last


def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors [b, heads, t, d] of one dtype as one buffer [t, b, numbers]."""
    b, _, count, _ = tensors[0].shape
    kinds = [(x.shape[1], x.shape[3]) for x in tensors]
    buffer = tensors[0].new_empty((count, b, sum([heads * d for heads, d in kinds])))
    for view, x in zip(unpacked(buffer, kinds), tensors, strict=True):
        view.copy_(x)
    return buffer


def unpacked(buffer: torch.Tensor, kinds: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """The tensors [b, heads, t, d] of heads and d that are in a buffer, as views of it."""
    views = buffer.split([heads * d for heads, d in kinds], -1)
    return [view.unflatten(-1, kind).permute(1, 2, 0, 3) for view, kind in zip(views, kinds, strict=True)]


def to_heads(
    ax: Axis, lengths: Sequence[int], tensors: Sequence[torch.Tensor], heads: Sequence[Sequence[Range]], tag: Hashable
) -> list[torch.Tensor]:
    """Exchanges pieces of a sequence for heads: [b, heads of this rank, all tokens, d] of each tensor.

    Args:
        lengths: of the ranks' pieces.
        tensors: [b, all heads, tokens of this rank, d], of one dtype.
        heads: for every rank those of each tensor that it gets.
    """
    send = [packed([x[:, a:b] for x, (a, b) in zip(tensors, each, strict=True)]) for each in heads]
    whole = send[ax.rank].new_empty((sum(lengths), *send[ax.rank].shape[1:]))
    tag = f"{tag} of {list(lengths)} tokens to heads {list(heads)}"
    pieces.start_exchange(ax, send, whole.split(list(lengths)), tag)()
    return unpacked(whole, [(b - a, x.shape[3]) for x, (a, b) in zip(tensors, heads[ax.rank], strict=True)])


def to_tokens(
    ax: Axis, lengths: Sequence[int], buffer: torch.Tensor, kinds: Sequence[Sequence[tuple[int, int]]], tag: Hashable
) -> list[list[torch.Tensor]]:
    """The way back: from every rank its heads of each tensor, for this rank's piece of the sequence.

    Args:
        buffer: of `packed`: this rank's heads for all tokens.
        kinds: for every rank the heads and d of each tensor.
    """
    send = buffer.split(list(lengths))
    own = send[ax.rank]
    receive = [own.new_empty((*own.shape[:2], sum([heads * d for heads, d in kind]))) for kind in kinds]
    tag = f"{tag} of {[list(kind) for kind in kinds]} heads to {list(lengths)} tokens"
    pieces.start_exchange(ax, send, receive, tag)()
    return [unpacked(each, kind) for each, kind in zip(receive, kinds, strict=True)]
