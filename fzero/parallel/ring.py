"""fz.parallel.ring: attention to keys and values that come from rank after rank, of which one keeps only its own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fzero.base import flash, private
from fzero.base.arguments import wrong
from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.parallel import blocks, maps
from fzero.parallel.attention import Attention, Plan, Shapes, Three, agreed, attended, floats, need_shapes
from fzero.parallel.axis import need_axis
from fzero.parallel.visible import Visible, options_of, visible

Span = tuple[int, int]  # the places of tokens in the whole sequence: the first, and the one behind the last
ORDERS = ("contiguous", "zigzag")


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | None = None,
    **options: object,
) -> torch.Tensor:
    """Exact attention on one rank, tile by tile: the scores are never stored. It has derivatives of any order.

    Stands in the place of `torch.nn.functional.scaled_dot_product_attention`, whose arguments it takes.

    Args:
        q: [b, heads, t, d].
        k, v: [b, kv_heads, t, d]. `kv_heads` divides `heads`; neighbouring heads share a KV head.
        attn_mask: True for what is seen, or floats that are added to the scores; [t, t] or what broadcasts to
            [b, heads, t, t]. With it scores are stored, and nothing else may hide tokens.
        dropout_p: 0.0, as there is no dropout.
        is_causal: True hides later tokens. Until 1.0 its older name `causal` works too.
        options: keywords. `scale`: of the scores, by default 1 / sqrt(d). `enable_gqa`: False refuses heads that share
            a KV head. `window`: number of tokens that one sees in each direction, itself included. `documents`:
            cumulative lengths, such as [0, 5, 9], of documents that do not see each other.

    Returns:
        [b, heads, t, d], in the dtype of q. Sums are in float32 at least.

    Raises:
        TypeError, ValueError: tensors or options do not fit.

    Example:
        >>> x = torch.arange(3.0).reshape(1, 1, 3, 1)
        >>> fz.parallel.attention(x, x, x, is_causal=True, window=1).flatten().tolist()
        [0.0, 1.0, 2.0]
    """
    if attn_mask is None:
        return _plain(q, k, v, None, dropout_p, is_causal, **options)
    return _masked(q, k, v, attn_mask, {**options, "dropout_p": dropout_p, "is_causal": is_causal})


def _masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, given: Mapping[str, object]
) -> torch.Tensor:
    """Attention with a mask of the caller's own, by all scores at once: a differentiable function of it, too."""
    who = "parallel.attention"
    options = options_of(who, **given)
    if options.is_causal or options.window is not None or options.documents is not None:
        raise ValueError(
            f"{who}: got attn_mask beside is_causal, window or documents, expected attn_mask alone. Put them into it."
        )
    q, k, v = floats(who, q, k, v)
    need_shapes((q.shape, k.shape, v.shape), f"{who}: got", options)
    if not isinstance(mask, torch.Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise wrong(who, "attn_mask", mask, "a tensor of bools or floats, or None")
    shape = (*q.shape[:3], k.shape[2])
    sizes = zip(reversed(mask.shape), reversed(shape), strict=False)
    if not 1 < mask.ndim <= 4 or any(own not in (1, size) for own, size in sizes):
        raise ValueError(f"{who}: got attn_mask of shape {tuple(mask.shape)}, expected one that broadcasts to {shape}.")
    return _by_scores(q, k, v, mask, q.shape[3] ** -0.5 if options.scale is None else options.scale)


def _by_scores(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention by operations that every derivative goes through; a token that sees nothing gets zeros, as in torch."""
    with private.without_autocast():
        dtype, group = blocks.wide(q.dtype), q.shape[1] // max(k.shape[1], 1)
        keys, values = [x.to(dtype).repeat_interleave(group, 1) for x in (k, v)]
        scores = (q.to(dtype) * scale) @ keys.mT
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(dtype)
        nothing = (scores == -math.inf).all(-1, keepdim=True)  # whose softmax would be no number
        weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
        return (weights @ values).to(q.dtype)


def ring(ax: Axis, order: str = "contiguous", **options: object) -> Attention:
    """Makes an attention over a sequence that is cut over an axis. Keys and values go from rank to rank.

    The next keys and values are on their way while a rank computes with these. A rank is not sent what it does not see.
    Take `fz.parallel.ulysses` if there are at least as many heads as ranks.

    Source: Liu et al., 2023 (arXiv 2310.01889).

    Args:
        ax: an axis, from `fz.parallel.axis`.
        order: "contiguous": pieces of any lengths, in rank order. "zigzag": the sequence is cut into twice as many
            pieces as ranks, and rank r has the r-th from the front and the r-th from the back. Then causal attention
            costs all ranks the same. Use the same order in `fz.parallel.shard_sequence`.
        options: defaults for the calls: `is_causal`, `scale`, `enable_gqa`, `window` and `documents` (of the whole
            sequence) of `fz.parallel.attention`.

    Returns:
        A function of this rank's q [b, heads, t, d], k and v [b, kv_heads, t, d], and options.

    Raises:
        TypeError, ValueError: tensors or options do not fit, or differ between ranks. It is raised on every rank.

    Example:
        >>> def rank_main(rank):
        ...     attention = fz.parallel.ring(fz.parallel.axis(None, "sp"), is_causal=True)
        ...     x = torch.full((1, 1, 1, 1), float(rank))
        ...     return attention(x, torch.zeros_like(x), x).item()
        >>> fz.testing.run_ranks(rank_main, 3)
        [0.0, 0.5, 1.0]
    """
    need_axis(ax, "ring")
    if order not in ORDERS:
        raise ValueError(f"parallel.ring: got order={order!r}, expected one of {', '.join(ORDERS)}.")
    return Ring(ax, order, **options)


class Ring(Attention):
    """Attention to blocks that come from the ranks of an axis; None where there is only this one."""

    name = "ring"

    def __init__(self, ax: Axis | None, order: str = "contiguous", **options: object) -> None:
        self.name = "attention" if ax is None else "ring"
        super().__init__(**options)
        self.ax, self.order = ax, order

    def places(self, count: int) -> torch.Tensor:
        if self.ax is None:
            return torch.arange(count, device="cpu")
        lengths = [length for (length,) in pieces.told(self.ax, [count], "parallel.ring places")]
        spans = spans_of(lengths, self.order, "parallel.ring")[self.ax.rank]
        return torch.cat([torch.arange(start, stop, device="cpu") for start, stop in spans])

    def planned(self, shapes: Shapes, dtype: str, given: dict[str, object]) -> Plan:
        who = f"parallel.{self.name}"
        lengths, options = agreed(self.ax, who, shapes, f"{dtype} {self.order}", given)
        total = sum(lengths)
        if options.documents is not None and options.documents[-1] != total:
            raise ValueError(
                f"{who}: got documents that end at {options.documents[-1]}, expected {total}, the number of tokens of "
                "the whole sequence."
            )
        spans = spans_of(lengths, self.order, who)
        scale = shapes[0][3] ** -0.5 if options.scale is None else options.scale
        return RingPlan(self.ax, lengths, spans, visible(total, options), scale)


_plain = Ring(None)


def spans_of(lengths: Sequence[int], order: str, who: str) -> list[list[Span]]:
    """The places of every rank's tokens in the whole sequence."""
    if order == "contiguous":
        return [[span] for span in itertools.pairwise(pieces.starts(lengths))]
    count = len(lengths)
    parts = list(itertools.pairwise(pieces.starts(pieces.balanced(sum(lengths), 2 * count))))
    spans = [[parts[rank], parts[-1 - rank]] for rank in range(count)]
    expected = [sum([stop - start for start, stop in each]) for each in spans]
    if expected != list(lengths):
        raise ValueError(
            f"{who}: got pieces of {list(lengths)} tokens in zigzag order, expected {expected}. Cut them with "
            "fz.parallel.shard_sequence(..., order='zigzag')."
        )
    return spans


class Arrival(NamedTuple):
    """Keys and values of one rank, [b, kv_heads, t, d]."""

    source: int  # whose they are
    target: int  # who has those of this rank at the same time
    seen: bool  # whether this rank sees any of them; if not, they are empty
    shown: bool  # whether `target` sees any of this rank's
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, eq=False)
class RingPlan:
    """How attention to the blocks of several ranks is computed."""

    ax: Axis | None
    lengths: Sequence[int]  # how many tokens each rank has
    spans: Sequence[Sequence[Span]]  # where these lie in the whole sequence
    sees: Visible  # what every token of the sequence does
    scale: float

    @property
    def rank(self) -> int:
        return self.ax.rank if self.ax is not None else 0

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attended(self, q, k, v)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if (causal := self._at_once(q, v)) is not None:
            return flash.attention(q, k, v, causal, self.scale)
        queries = blocks.grouped(q, k.shape[1])
        state = blocks.begin(queries, v.shape[3])
        for block in self._arrivals(k, v):
            keys, values = block.k.flatten(0, 1), block.v.flatten(0, 1)
            for rows, columns, seen in self._pairs(block):
                own = state.of(rows.start, rows.stop)
                blocks.attend(own, queries[:, :, rows], keys[:, columns], values[:, columns], seen, self.scale)
        return blocks.finish(state, q.dtype, k.shape[:2])

    def pull(self, of: Three, out: torch.Tensor, logarithms: torch.Tensor, cotangent: torch.Tensor) -> Three:
        q, k, v = of
        if (causal := self._at_once(q, v)) is not None:
            by_q, by_k, by_v = flash.pullback(cotangent, q, k, v, out, logarithms, causal, self.scale)
            return by_q, by_k.to(k.dtype), by_v.to(v.dtype)
        queries, outs, tops, cotangents = [blocks.grouped(x, k.shape[1]) for x in (q, out, logarithms, cotangent)]
        dtype = blocks.wide(q.dtype)
        total = [torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in (queries, k, v)]
        for block in self._arrivals(k, v):
            keys, values = block.k.flatten(0, 1), block.v.flatten(0, 1)
            sums = [total[1].flatten(0, 1), total[2].flatten(0, 1)]  # in the same memory
            if block.source != self.rank:
                sums = [keys.new_zeros(x.shape, dtype=dtype) for x in (keys, values)]
            for rows, columns, seen in self._pairs(block):
                blocks.pull(
                    blocks.Grads(total[0][:, :, rows], sums[0][:, columns], sums[1][:, columns]),
                    queries[:, :, rows],
                    keys[:, columns],
                    values[:, columns],
                    outs[:, :, rows],
                    tops[:, :, rows],
                    cotangents[:, :, rows],
                    seen,
                    self.scale,
                )
            if block.source != self.rank:
                self._return(block, [x.unflatten(0, k.shape[:2]) for x in sums], total[1:])
        return total[0].reshape(q.shape).to(q.dtype), total[1].to(k.dtype), total[2].to(v.dtype)

    def _at_once(self, q: torch.Tensor, v: torch.Tensor) -> bool | None:
        """Tells whether all of this rank's tokens and of no others are one region: whether that is causal, or None."""
        if len(self.lengths) > 1 or not q.numel():
            return None
        parts = blocks.Seen(self.sees, 0, 0).regions(q, v, self.scale)
        return parts[0].causal if parts is not None and len(parts) == 1 else None

    def formula(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.ax is not None:
            k, v = [maps.gather(x, self.ax, 2, self.lengths, own=True) for x in (k, v)]
        spans = self.spans[self.rank]
        rows = Visible(*[torch.cat([each[start:stop] for start, stop in spans]) for each in self.sees])
        places = [torch.arange(start, stop, device=q.device) for each in self.spans for start, stop in each]
        return _by_scores(q, k, v, ~rows.hidden(torch.cat(places)), self.scale)

    def _arrivals(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[Arrival]:
        """The blocks of all ranks that some rank sees, this one's own first."""
        yield Arrival(self.rank, self.rank, True, True, k, v)
        ranks = range(len(self.lengths))
        distances = [by for by in ranks[1:] if any(self._seen(rank, (rank - by) % len(ranks)) for rank in ranks)]
        if not distances:
            return
        own, kinds = torch.cat([k, v], 3), [k.shape[3], v.shape[3]]
        ahead = self._start(own, distances[0])
        try:
            for number, by in enumerate(distances):
                buffers, source = ahead(), (self.rank - by) % len(self.lengths)
                ahead = list
                if number + 1 < len(distances):
                    ahead = self._start(own, distances[number + 1])
                target = (self.rank + by) % len(self.lengths)
                seen, shown = self._seen(self.rank, source), self._seen(target, self.rank)
                yield Arrival(source, target, seen, shown, *buffers[source].split(kinds, 3))
        finally:
            ahead()  # also where an error ends this: what is under way would meet a later message

    def _seen(self, rank: int, source: int) -> bool:
        """Tells whether a token of one rank sees any of another one's."""
        pairs = itertools.product(self.spans[rank], self.spans[source])
        return any(self.sees.of(*own).any(*other) for own, other in pairs)

    def _start(self, own: torch.Tensor, by: int) -> pieces.Came:
        """Begins to send this rank's block to the rank `by` places behind, and to get that of the one before."""
        assert self.ax is not None
        source, target = (self.rank - by) % self.ax.size, (self.rank + by) % self.ax.size
        count = self.lengths[source] if self._seen(self.rank, source) else 0
        empty = own[:, :, :0]
        shown = own if self._seen(target, self.rank) else empty
        send = [shown if rank == target else empty for rank in range(self.ax.size)]
        b, heads, _, d = own.shape
        shapes = [(b, heads, count if rank == source else 0, d) for rank in range(self.ax.size)]
        tag = f"parallel.ring by {by} of {list(self.lengths)} tokens of {(b, heads, d)}"
        return pieces.begin(self.ax, send, shapes, tag)

    def _return(self, block: Arrival, grads: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> None:
        """Sends the cotangents of a block back to its rank, and adds those that come for this rank's own."""
        assert self.ax is not None
        buffer = torch.cat([*grads], 3)
        empty, (b, heads, _, d) = buffer[:, :, :0], buffer.shape
        send = [buffer if rank == block.source and block.seen else empty for rank in range(self.ax.size)]
        count = self.lengths[self.rank] if block.shown else 0
        shapes = [(b, heads, count if rank == block.target else 0, d) for rank in range(self.ax.size)]
        by = (self.rank - block.source) % self.ax.size
        tag = f"parallel.ring back by {by} of {list(self.lengths)} tokens of {(b, heads, d)}"
        arrived = pieces.exchange(self.ax, send, shapes, tag)[block.target]
        if block.shown:
            for total, x in zip(own, arrived.split([x.shape[3] for x in grads], 3), strict=True):
                total.add_(x)

    def _pairs(self, block: Arrival) -> Iterator[tuple[slice, slice, blocks.Seen]]:
        """Rows and columns of tokens that lie one after the other, and what these see of those."""
        if block.seen:
            for (rows, place), (columns, start) in itertools.product(*map(self._slices, (self.rank, block.source))):
                yield rows, columns, blocks.Seen(self.sees.of(place, place + rows.stop - rows.start), place, start)

    def _slices(self, rank: int) -> list[tuple[slice, int]]:
        """Where a rank's spans lie among its own tokens, and in the whole sequence."""
        spans = self.spans[rank]
        starts = pieces.starts([stop - start for start, stop in spans])
        return [(slice(*own), start) for own, (start, _) in zip(itertools.pairwise(starts), spans, strict=True)]
