"""fz.parallel.ulysses: each rank gets all tokens for some heads, attends, and sends the outputs back."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fzero.base.arguments import need_int, wrong
from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.engine.compiled import leave_out
from fzero.parallel import blocks, maps, watched
from fzero.parallel.attention import Attention, Plan, Shapes, Three, agreed, attended, told_if_wrong
from fzero.parallel.axis import need_axis
from fzero.parallel.forms import need_cut
from fzero.parallel.ring import Ring
from fzero.parallel.ring import attention as plain
from fzero.parallel.types import running
from fzero.parallel.varying import unseen
from fzero.parallel.visible import torchs

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Range = tuple[int, int]  # the first of some heads, and the one behind the last


def ulysses(
    attention: Callable[..., torch.Tensor] | None, ax: Axis, chunks: int = 1, **options: object
) -> Callable[..., torch.Tensor]:
    """Makes an attention over a sequence that is cut over an axis. Each rank gets all tokens of some heads.

    Heads need not divide by the number of ranks, and there may be fewer heads than ranks. Pieces of the sequence have
    any lengths, in rank order.

    Source: Jacobs et al., 2023 (arXiv 2309.14509); chunks: arXiv 2602.21196.

    Args:
        attention: computes all tokens of some heads. None takes `fz.parallel.attention`. `fz.parallel.ring(other)` is
            for a sequence that is cut over `other` first, and then over `ax`. Your own function takes q [b, heads, t,
            d], k and v [b, kv_heads, t, d] and keywords; every rank calls it, with one head of zeros if it has none.
        ax: an axis, from `fz.parallel.axis`.
        chunks: number of parts in which heads are sent, one after the other. More parts need less memory, and the
            pullback computes each again. 1 with a function of your own.
        options: defaults for the calls: keywords of `attention`, such as `is_causal`, `scale`, `window` and
            `documents` (of the whole sequence). Your own function gets all keywords of a call, and so does
            `F.scaled_dot_product_attention`: an `attn_mask` is of the whole sequence, and the same for all heads.

    Returns:
        A function of this rank's q [b, heads, t, d], k and v [b, kv_heads, t, d], and options.

    Raises:
        TypeError, ValueError: tensors or options do not fit, or differ between ranks. It is raised on every rank.

    Example:
        >>> def rank_main(rank):
        ...     attention = fz.parallel.ulysses(None, fz.parallel.axis(None, "sp"), is_causal=True)
        ...     x = torch.full((1, 2, 1, 1), float(rank))
        ...     return attention(x, torch.zeros_like(x), x).flatten().tolist()
        >>> fz.testing.run_ranks(rank_main, 3)
        [[0.0, 0.0], [0.5, 0.5], [1.0, 1.0]]
    """
    need_axis(ax, "ulysses")
    chunks = need_int(chunks, "parallel.ulysses", "chunks", "a number of parts of the heads", least=1)
    if attention is None or attention is plain:
        attention = Ring(None)
    if not callable(attention):
        raise wrong("parallel.ulysses", "attention", attention, "an attention function or None")
    if isinstance(attention, (Ulysses, Composed)):
        raise ValueError(
            "parallel.ulysses: got the attention of another fz.parallel.ulysses, expected fz.parallel.ring, or one "
            "axis for heads: fz.parallel.axis(mesh, (first, second)) takes two axes as one."
        )
    if isinstance(attention, Attention):
        return Ulysses(attention, ax, chunks, **options)
    if chunks > 1:
        raise ValueError(
            f"parallel.ulysses: got chunks={chunks} with an attention of your own, expected 1: its pullback keeps what "
            "all parts computed. Take None, or fz.parallel.ring."
        )
    return Composed(attention, ax, options)


class Part(NamedTuple):
    """The heads that one rank has of one chunk, and the KV heads that these need, which `group` heads share."""

    heads: Range
    kv_heads: Range
    group: int

    @property
    def shared(self) -> list[int] | None:
        """The KV head of each head, by their places in this part; None where groups of one size follow one another."""
        mine = [head // self.group - self.kv_heads[0] for head in range(*self.heads)]
        count = self.kv_heads[1] - self.kv_heads[0]
        if count == 0 or (len(mine) % count == 0 and mine == [i // (len(mine) // count) for i in range(len(mine))]):
            return None
        return mine


def dealt(ranks: int, heads: int, kv_heads: int, chunks: int) -> list[list[Part]]:
    """For every chunk that has heads the part of each rank, which may be empty."""
    group, out = heads // kv_heads, [list[Part]() for _ in range(chunks)]
    for first, last in itertools.pairwise(pieces.starts(pieces.balanced(heads, ranks))):
        bounds = itertools.pairwise(pieces.starts(pieces.balanced(last - first, chunks)))
        for parts, (start, stop) in zip(out, bounds, strict=True):
            own = (first + start, first + stop)
            needed = (own[0] // group, (own[1] - 1) // group + 1) if start < stop else (0, 0)
            parts.append(Part(own, needed, group))
    return [parts for parts in out if any(start < stop for (start, stop), *_ in parts)]


class Ulysses(Attention):
    """All tokens for some heads by an attention that computes its own pullback."""

    name = "ulysses"

    def __init__(self, inner: Attention, ax: Axis, chunks: int, **options: object) -> None:
        super().__init__(**{**inner.fixed, **torchs("parallel.ulysses", options)})
        self.inner, self.ax, self.chunks = inner, ax, chunks

    def places(self, count: int) -> torch.Tensor:
        lengths = [length for (length,) in pieces.told(self.ax, [count], "parallel.ulysses places")]
        return self.inner.places(sum(lengths)).split(lengths)[self.ax.rank]

    def planned(self, shapes: Shapes, dtype: str, given: dict[str, object]) -> UlyssesPlan:
        lengths, _ = agreed(self.ax, "parallel.ulysses", shapes, f"{dtype} {self.chunks} {type(self.inner)}", given)
        (b, *_, d), _, (*_, size) = shapes
        own = (b, 1, sum(lengths), d)
        inner = self.inner.planned((own, own, (*own[:3], size)), dtype, given)
        return UlyssesPlan(self.ax, lengths, self.chunks, inner)


@dataclass(frozen=True, eq=False)
class UlyssesPlan:
    """How tokens are exchanged for heads and back."""

    ax: Axis
    lengths: Sequence[int]  # of the ranks' pieces
    chunks: int  # the parts that every rank's heads come in
    inner: Plan  # how all tokens of some heads are attended to

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.chunks > 1:  # of which nothing is kept: the pullback runs each again
            return attended(self, q, k, v)
        return composed(self.ax, self.lengths, self.inner.attend, q, k, v)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = q.new_zeros((*q.shape[:3], v.shape[3]))
        with unseen():
            for parts in self._parts(q, k):
                of_heads = _shared(self.inner.attend, parts[self.ax.rank], self._heads(parts, q, k, v))
                self._return(parts, [of_heads], [out])
        return out, q.new_empty(0)

    def pull(self, of: Three, out: torch.Tensor, logarithms: torch.Tensor, cotangent: torch.Tensor) -> Three:
        grads = [torch.zeros_like(x, dtype=blocks.wide(x.dtype)) for x in of]
        for parts in self._parts(*of[:2]):
            self._return(parts, self._pulled(parts, *of, cotangent), grads)
        by_q, by_k, by_v = [total.to(x.dtype) for total, x in zip(grads, of, strict=True)]
        return by_q, by_k, by_v

    def _pulled(self, parts: Sequence[Part], *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        """The cotangents of this rank's heads of one chunk, by running it again."""
        own = [x.requires_grad_() for x in self._heads(parts, *tensors[:3])]
        with torch.enable_grad():
            out = _shared(self.inner.attend, parts[self.ax.rank], own)
        return torch.autograd.grad(out, own, self._heads(parts, tensors[3]))

    def formula(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return composed(self.ax, self.lengths, self.inner.formula, q, k, v)

    def _parts(self, q: torch.Tensor, k: torch.Tensor) -> list[list[Part]]:
        return dealt(self.ax.size, q.shape[1], k.shape[1], self.chunks)

    def _heads(self, parts: Sequence[Part], *tensors: torch.Tensor) -> list[torch.Tensor]:
        """This rank's heads of one chunk, for all tokens: one tensor after the other, as each takes memory."""
        pairs = zip(_ranges(parts), tensors, strict=False)
        return [heads_of(self.ax, self.lengths, [own], [x])[0] for own, x in pairs]

    def _return(self, parts: Sequence[Part], tensors: Sequence[torch.Tensor], totals: Sequence[torch.Tensor]) -> None:
        """The way back, where they are added up."""
        for own, x, total in zip(_ranges(parts), tensors, totals, strict=False):
            back = tokens_of(self.ax, self.lengths, own, x).split(_sizes(own), 1)
            for heads, came in zip(own, back, strict=True):
                total[:, slice(*heads)] += came


class Composed:
    """All tokens for some heads by any function, between the maps of `fz.parallel`."""

    def __init__(self, attention: Callable[..., torch.Tensor], ax: Axis, fixed: dict[str, object]) -> None:
        self.attention, self.ax, self.fixed = attention, ax, fixed

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: object) -> torch.Tensor:
        return _called(self, q, k, v, {**self.fixed, **more})

    def _attended(self, options: dict[str, object], *tensors: torch.Tensor) -> torch.Tensor:
        count = tensors[0].shape[1]
        if not count:  # one of zeros: the result depends on what it does elsewhere, and ranks pull back the same maps
            tensors = tuple(torch.cat([x, x.new_zeros((x.shape[0], 1, *x.shape[2:]))], 1) for x in tensors)
        q, k, v = tensors
        out, expected = self.attention(q, k, v, **options), (*q.shape[:3], v.shape[3])
        if not isinstance(out, torch.Tensor) or out.shape != expected:
            raise wrong("parallel.ulysses", "the result of attention", out, f"a tensor of shape {expected}")
        return out[:, :count]


def _called(
    of: Composed, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, object]
) -> torch.Tensor:
    who = "parallel.ulysses"
    with told_if_wrong(of.ax, who):
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, torch.Tensor):
                raise wrong(who, name, x, "a tensor [b, heads, t, d]")
    # options of other kinds are not compared: a function may be given its rank's own
    plain = {name: x for name, x in sorted(options.items()) if isinstance(x, (bool, int, float, str, type(None)))}
    dtypes = f"{q.dtype} {k.dtype} {v.dtype} {plain}"
    lengths, _ = agreed(of.ax, who, (q.shape, k.shape, v.shape), dtypes, {})
    need_cut(of.ax, "ulysses", dict.fromkeys((q, k, v), 2))
    watched.need_whole(ulysses, q, k, v)
    attend = functools.partial(of._attended, options)
    return watched.attended(functools.partial(composed, of.ax, lengths, attend), (q, k, v))


leave_out(__name__, "_called")


def composed(
    ax: Axis, lengths: Sequence[int], attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Tokens exchanged for heads and back by linear maps, which every derivative goes through."""
    (parts,) = dealt(ax.size, q.shape[1], k.shape[1], 1)
    ranges = _ranges(parts)
    out = _shared(attend, parts[ax.rank], heads_of(ax, lengths, ranges, (q, k, v)))
    return tokens_of(ax, lengths, ranges[0], out)


def heads_of(
    ax: Axis, lengths: Sequence[int], ranges: Sequence[Sequence[Range]], tensors: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Tensors [b, heads, tokens of this rank, d] -> [b, heads of this rank, all tokens, d] of each.

    Args:
        lengths: of the ranks' pieces of the sequence.
        ranges: for every tensor the heads that each rank gets.
        tensors: those of one d and dtype travel together, but in a dry run, which knows how each of them is cut.
    """
    apart = running.get() is not None or len({(x.shape[3], x.dtype) for x in tensors}) > 1
    if apart and len(tensors) > 1:
        return [heads_of(ax, lengths, [own], [x])[0] for own, x in zip(ranges, tensors, strict=True)]
    by_tensor = [_chosen(x, own) for x, own in zip(tensors, ranges, strict=True)]
    joined = torch.cat([x for of_rank in zip(*by_tensor, strict=True) for x in of_rank], 1)
    sizes = [*zip(*map(_sizes, ranges), strict=True)]
    out = maps.all_to_all(joined, ax, 1, 2, [*map(sum, sizes)], lengths)
    return [out] if len(tensors) == 1 else out.split(sizes[ax.rank], 1)


def tokens_of(ax: Axis, lengths: Sequence[int], ranges: Sequence[Range], x: torch.Tensor) -> torch.Tensor:
    """The way back: [b, heads of this rank, all tokens, d] -> [b, those of all ranks, tokens of this rank, d]."""
    return maps.all_to_all(x, ax, 2, 1, lengths, _sizes(ranges))


def _shared(attend: Attend, part: Part, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Attention to KV heads, once for each head where some share more than others."""
    (q, k, v), shared = tensors, part.shared
    return attend(q, k, v) if shared is None else attend(q, k[:, shared], v[:, shared])


def _ranges(parts: Sequence[Part]) -> list[tuple[Range, ...]]:
    """For each of q, k and v the heads that every rank gets."""
    heads, kv_heads, _ = zip(*parts, strict=True)
    return [heads, kv_heads, kv_heads]


def _sizes(ranges: Sequence[Range]) -> list[int]:
    return [stop - start for start, stop in ranges]


def _chosen(x: torch.Tensor, ranges: Sequence[Range]) -> Sequence[torch.Tensor]:
    """The heads that each rank gets; some may be there more than once."""
    sizes = _sizes(ranges)
    if [start for start, _ in ranges] == pieces.starts(sizes)[:-1] and sum(sizes) == x.shape[1]:
        return x.split(sizes, 1)  # whose pullback puts them together at once
    return [x[:, slice(*own)] for own in ranges]
