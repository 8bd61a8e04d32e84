"""Attention of some tokens to a block of others, tile by tile: softmax in one pass, and what pulls it back.

The scores of one tile are all that ever exists (FlashAttention, arXiv 2205.14135). Blocks may come one after the
other and in any order: `begin`, `attend` once for each block, `finish`. What is seen in whole regions is left to
torch's own kernel, which takes half of the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fzero.base import flash
from fzero.parallel.loss import wide
from fzero.parallel.visible import Region, Visible, regions

EDGE = 256  # rows and columns of a tile, whose scores stay in a processor's cache


class State(NamedTuple):
    """What tokens have seen so far: heads that share a key come as a group, [b * kv_heads, group, t, ...]."""

    total: torch.Tensor  # the sum of values by their weights
    weight: torch.Tensor  # the sum of the weights exp(score - top)
    top: torch.Tensor  # the largest score; a finite number where there was none

    def of(self, start: int, stop: int) -> State:
        """The same of some of the tokens, in the same memory."""
        return State(*[each[:, :, start:stop] for each in self])


def grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[b, heads, t, d] as [b * kv_heads, group, t, d]."""
    b, heads, *rest = x.shape
    return x.reshape(b * kv_heads, heads // kv_heads if kv_heads else 1, *rest)


def begin(q: torch.Tensor, d: int) -> State:
    """Before q [b * kv_heads, group, t, _] has seen anything; values have d numbers."""
    dtype, lead = wide(q.dtype), q.shape[:-1]
    total, weight = [q.new_zeros((*lead, size), dtype=dtype) for size in (d, 1)]
    return State(total, weight, torch.full_like(weight, torch.finfo(dtype).min))


class Seen(NamedTuple):
    """What tokens that lie one after the other see of others that do."""

    visible: Visible
    place: int  # of the first in the whole sequence
    start: int  # of the first of the others

    def regions(self, q: torch.Tensor, v: torch.Tensor, scale: float) -> list[Region] | None:
        """Those of q and of the others v that torch's kernel is for; None where it is for none."""
        kernel = flash.has_kernel(q, v, scale)
        return regions(self.visible, self.place, self.start, v.shape[-2]) if kernel else None


def attend(state: State, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen, scale: float) -> None:
    """Adds to a state what its tokens see of a block of keys and values.

    Args:
        q: [b * kv_heads, group, t, d].
        k, v: [b * kv_heads, s, d], of tokens one after the other in the sequence.
        seen: what the tokens of q see.
    """
    parts = seen.regions(q, v, scale)
    for rows, columns, causal in parts if parts and len(q) else ():
        keys, values = k[:, None, columns], v[:, None, columns]
        out, logarithms = flash.attention(q[:, :, rows], keys, values, causal, scale)
        total, weight, top = state.of(rows.start, rows.stop)
        best = torch.maximum(top, logarithms[..., None])
        shrink, grow = (top - best).exp_(), (logarithms[..., None] - best).exp_()
        total.mul_(shrink).addcmul_(out.to(total.dtype), grow)
        weight.mul_(shrink).add_(grow)
        top.copy_(best)
    for heads, rows, columns in _tiles(q, k, seen) if parts is None else ():
        shape = (heads.stop - heads.start, q.shape[1], rows.stop - rows.start)
        queries = _rows(q[heads, :, rows], state.total.dtype).mul(scale)
        total, weight, top = [_rows(each[heads, :, rows], each.dtype) for each in state]
        for place, hidden in columns:
            scores = _scores(queries, k[heads, place], hidden, shape)
            best = torch.maximum(top, scores.amax(-1, keepdim=True))
            scores.sub_(best).exp_()
            shrink = (top - best).exp_()
            weight = (weight * shrink).add_(scores.sum(-1, keepdim=True))
            total = (total * shrink).baddbmm_(scores, v[heads, place].to(scores.dtype))
            top = best
        for old, new in zip(state, (total, weight, top), strict=True):
            old[heads, :, rows] = new.view(*shape, -1)


def finish(state: State, dtype: torch.dtype, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs [b, heads, t, d], and logarithms of sums of exp(score) [b, heads, t]; `shape` is [b, kv_heads]."""
    out = state.total.div_(state.weight).to(dtype)
    logarithms = state.weight.log_().add_(state.top).squeeze(-1)
    return tuple(each.unflatten(0, [*shape]).flatten(1, 2) for each in (out, logarithms))  # type: ignore[return]


class Grads(NamedTuple):
    """The cotangents of q [b * kv_heads, group, t, d], k and v [b * kv_heads, s, d], which `pull` adds to."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def pull(
    grads: Grads,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logarithms: torch.Tensor,
    cotangent: torch.Tensor,
    seen: Seen,
    scale: float,
) -> None:
    """Adds to `grads` what a cotangent of the outputs is pulled back to by what its tokens saw of a block.

    Args:
        q, k, v, seen, scale: as in `attend`.
        out: [b * kv_heads, group, t, d], after all blocks.
        logarithms: [b * kv_heads, group, t] of `finish`.
        cotangent: [b * kv_heads, group, t, d].
    """
    parts = seen.regions(q, v, scale)
    for rows, columns, causal in parts if parts and len(q) else ():
        own = cotangent[:, :, rows], q[:, :, rows], k[:, None, columns], v[:, None, columns]
        pulled = flash.pullback(*own, out[:, :, rows], logarithms[:, :, rows], causal, scale)
        totals = grads.q[:, :, rows], grads.k[:, None, columns], grads.v[:, None, columns]
        for total, x in zip(totals, pulled, strict=True):
            total.add_(x)
    dtype = grads.q.dtype
    for heads, rows, columns in _tiles(q, k, seen) if parts is None else ():
        shape = (heads.stop - heads.start, q.shape[1], rows.stop - rows.start)
        queries = _rows(q[heads, :, rows], dtype).mul(scale)
        outs, cotangents = [_rows(each[heads, :, rows], dtype) for each in (out, cotangent)]
        inners, tops = (outs * cotangents).sum(-1, keepdim=True), _rows(logarithms[heads, :, rows, None], dtype)
        pulled = torch.zeros_like(queries)
        for place, hidden in columns:
            keys, values = k[heads, place].to(dtype), v[heads, place].to(dtype)
            weights = _scores(queries, keys, hidden, shape).sub_(tops).exp_()
            grads.v[heads, place].baddbmm_(weights.mT, cotangents)
            scores = torch.baddbmm(inners, cotangents, values.mT, beta=-1).mul_(weights)
            pulled.baddbmm_(scores, keys)
            grads.k[heads, place].baddbmm_(scores.mT, queries)
        grads.q[heads, :, rows].add_(pulled.view(*shape, -1), alpha=scale)


def _rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows of a group of heads one after the other: [heads, group * rows, d]."""
    return x.to(dtype).flatten(1, 2)


def _scores(
    queries: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor | None, shape: tuple[int, ...]
) -> torch.Tensor:
    scores = torch.bmm(queries, k.to(queries.dtype).mT)
    if hidden is not None:
        scores.view(*shape, -1).masked_fill_(hidden, -math.inf)
    return scores


Columns = list[tuple[slice, torch.Tensor | None]]


def _tiles(q: torch.Tensor, k: torch.Tensor, seen: Seen) -> Iterator[tuple[slice, slice, Columns]]:
    """Heads, rows, and for these the columns that are seen, with what is hidden there; None where nothing is."""
    (lead, group, count, _), width, start = q.shape, k.shape[1], seen.start
    height = max(1, EDGE // group)
    deep = max(1, EDGE * EDGE // max(1, group * min(height, count) * min(EDGE, width)))
    for first in range(0, count, height):
        rows = slice(first, min(first + height, count))
        own = seen.visible.of(rows.start, rows.stop)
        # neither end ever falls: the first token sees the first of all that is seen, and the last one the last
        (lowest, low), (high, highest) = [[place - start for place in each] for each in own.ends()]
        columns: Columns = []
        end = min(highest, width)
        for place in range(max(lowest, 0), end, EDGE):
            stop = min(place + EDGE, end)
            everything = low <= place and stop <= high
            places = torch.arange(start + place, start + stop, device=q.device)
            columns.append((slice(place, stop), None if everything else own.hidden(places)))
        if columns:
            for head in range(0, lead, deep):
                yield slice(head, min(head + deep, lead)), rows, columns
