"""Pieces of any sizes between the ranks of one axis, and their sums in rank order, which are the same on every rank."""

from __future__ import annotations

import contextvars
import itertools
import math
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from fzero.base import private
from fzero.base.context import variable
from fzero.base.random import seeded
from fzero.base.replay import sending
from fzero.comm import backend
from fzero.comm.axis import Axis
from fzero.comm.backend import Wait, done
from fzero.comm.playing import playing

Came = Callable[[], list[torch.Tensor]]  # waits, and gives what has come
Start = Callable[[Sequence[torch.Tensor]], Came]


class Graph(Protocol):
    """What messages are parts of, where a function is traced."""

    def begin(self, start: Start, send: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> Came: ...
    def told(self, axis: Axis, numbers: tuple[int, ...], tag: Hashable) -> list[tuple[int, ...]]: ...
    def stream(self, draw: Callable[[], seeded]) -> AbstractContextManager[None]: ...


graph: contextvars.ContextVar[Graph | None] = variable("graph", None)
# takes what ranks tell each other: (ranks, words, this one's numbers) -> all numbers
heard: contextvars.ContextVar[MutableMapping[object, list[tuple[int, ...]]] | None] = variable("heard", None)
SMALL = 1 << 15  # elements of a sum that every rank sends whole: one message each way costs less than two


def start_exchange(axis: Axis, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor], tag: Hashable) -> Wait:
    """Begins to send `send[r]` to rank r and to fill `receive[r]` from it; the result waits for the end.

    Args:
        send, receive: a contiguous tensor for each rank, those of this rank too. What is empty is not sent.
        tag: the same on all ranks. With the sizes in it that all must agree on, ranks that do not never read each
            other's messages, which gloo ends a process for.
    """
    if axis.size == 1:
        receive[0].copy_(send[0])
        return done
    if (player := playing.get()) is not None:
        sending(player.exchange, *receive)(axis.name, send, receive, tag)
        return done
    assert axis.group is not None
    sent = sum([piece.nbytes for rank, piece in enumerate(send) if rank != axis.rank])
    call = axis._announced("exchange", tag, send[0], axis.group, sent, receive)
    wait = call(backend.start_exchange)(send, receive, axis.group, axis._number("exchange", (tag, send[0].dtype)))
    return call(wait)


def exchange(
    axis: Axis, send: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], tag: Hashable
) -> list[torch.Tensor]:
    """What every rank has sent to this one, in rank order: new tensors of these shapes."""
    return begin(axis, send, shapes, tag)()


def begin(axis: Axis, send: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], tag: Hashable) -> Came:
    """Begins an exchange; the result waits for its end, and gives what has come."""

    def start(send: Sequence[torch.Tensor]) -> Came:
        receive = made(send)
        wait = start_exchange(axis, send, receive, tag)
        return lambda: (wait(), send, receive)[2]  # what is sent lives until then

    def made(send: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [send[axis.rank].new_empty(tuple(shape)) for shape in shapes]

    send = [piece.contiguous() for piece in send]
    traced = graph.get() if axis.size > 1 else None
    return start(send) if traced is None else traced.begin(start, send, made(send))


def told(axis: Axis, numbers: Sequence[int], tag: Hashable) -> list[tuple[int, ...]]:
    """The numbers of every rank, in rank order: equally many on each."""
    if axis.size == 1 or axis.fake:
        return [tuple(numbers)] * axis.size
    if (traced := graph.get()) is not None:
        return traced.told(axis, tuple(numbers), tag)
    with private.below_transforms():
        own = torch.tensor(numbers, dtype=torch.int64, device=axis.device)
        every = [tuple(x.tolist()) for x in exchange(axis, [own] * axis.size, [own.shape] * axis.size, tag)]
    if (known := heard.get()) is not None:
        known[axis.members, tag, tuple(numbers)] = every
    return every


def total(axis: Axis, x: torch.Tensor, tag: Hashable) -> torch.Tensor:
    """The elementwise sum over the ranks, a new tensor: in rank order, 16-bit floats in float32."""
    if axis.size == 1:
        return x.clone()
    tag = f"{tag} of {tuple(x.shape)}"
    if not axis.adds_here:
        assert axis.group is not None
        group = axis.group

        def start(send: Sequence[torch.Tensor]) -> Came:
            out = send[0].clone(memory_format=torch.contiguous_format)
            axis._announced("all_reduce sum", tag, out, group, into=(out,))(backend.all_reduce)(out, group)
            return lambda: [out]

        traced = graph.get()
        like = [torch.empty_like(x, memory_format=torch.contiguous_format)]
        return (start([x]) if traced is None else traced.begin(start, [x], like))()[0]
    if axis.size == 2 or x.numel() < SMALL:
        return _sum(exchange(axis, [x] * axis.size, [x.shape] * axis.size, tag))
    pieces = x.reshape(-1).tensor_split(axis.size)
    mine = _sum(exchange(axis, pieces, [pieces[axis.rank].shape] * axis.size, tag))
    whole = x.new_empty(x.shape)
    send, parts = [mine] * axis.size, whole.view(-1).tensor_split(axis.size)
    if graph.get() is None:
        start_exchange(axis, send, parts, tag)()
    else:
        whole.view(-1).copy_(torch.cat(exchange(axis, send, [part.shape for part in parts], tag)))
    return whole


def most(axis: Axis, numbers: Sequence[int], tag: Hashable) -> list[int]:
    """The largest of all ranks' numbers, one by one: replicas included, and ranks that leaves are cut over."""
    own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    for group in axis._all_groups:
        own = own.to(backend.device_of(group, host=True))
        axis._announced("all_reduce max", tag, own, group)(backend.all_reduce)(own, group, "max")
    return own.tolist()


def scattered(axis: Axis, x: torch.Tensor, dim: int, sizes: Sequence[int], tag: Hashable) -> torch.Tensor:
    """This rank's piece along `dim` of the sum over the ranks, added in rank order."""
    pieces = x.split(list(sizes), dim)
    shape, tag = pieces[axis.rank].shape, f"{tag} of {tuple(x.shape)} cut into {list(sizes)} along dim {dim}"
    return _sum(exchange(axis, pieces, [shape] * axis.size, tag))


def gathered(axis: Axis, x: torch.Tensor, dim: int, sizes: Sequence[int], tag: Hashable) -> torch.Tensor:
    """The ranks' tensors one after the other along `dim`, in rank order."""
    shapes = [(*x.shape[:dim], size, *x.shape[dim + 1 :]) for size in sizes]
    if axis.size == 1:
        return x.clone()
    others = (*x.shape[:dim], *x.shape[dim + 1 :])
    tag = f"{tag} of {list(sizes)} along dim {dim} beside {others}"
    send = [x.contiguous()] * axis.size
    if math.prod(x.shape[:dim]) > 1 or graph.get() is not None:
        return torch.cat(exchange(axis, send, shapes, tag), dim)
    full = x.new_empty((*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]))
    start_exchange(axis, send, full.split(list(sizes), dim), tag)()  # which lie one after the other in its memory
    return full


def _sum(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of tensors, in their order; 16-bit floats are added in float32."""
    first, *others = terms
    wide = torch.float32 if first.dtype in (torch.bfloat16, torch.float16) else first.dtype
    if first.dtype == torch.bool:
        raise TypeError("A sum over ranks got a tensor of torch.bool, expected numbers. Convert it with .to(...).")
    if wide == first.dtype or private.is_fake(first):
        out = torch.add(first, others[0]) if others else first
        for term in others[1:]:
            out.add_(term)
        return out
    out = torch.empty_like(first)
    parts = zip(*[x.reshape(-1).split(backend.CHUNK) for x in (out, *terms)], strict=True)
    for target, begin, *more in parts:
        sums = begin.to(wide)
        for term in more:
            sums.add_(term)
        target.copy_(sums)
    return out


def starts(sizes: Sequence[int]) -> list[int]:
    """Where each of some pieces begins, and the last one ends."""
    return [0, *itertools.accumulate(sizes)]


def balanced(count: int, parts: int) -> list[int]:
    """The sizes of `parts` pieces of `count` elements, the first ones larger by one where that does not divide."""
    size, more = divmod(count, parts)
    return [size + (part < more) for part in range(parts)]
