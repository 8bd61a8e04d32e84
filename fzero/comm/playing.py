"""Ranks that this process plays on threads: what one sends to the others passes through its memory."""

from __future__ import annotations

import contextvars
import itertools
import math
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch

from fzero.base import private, thread_state
from fzero.base.context import during, variable

T = TypeVar("T")
playing: contextvars.ContextVar[Player | None] = variable("playing", None)
Pieces = Sequence[torch.Tensor]
Key = tuple[str, tuple[int, ...], int]  # an axis, where its ranks are on the other ones, and the number of the exchange


class Parted(RuntimeError):
    """Ranks have not called the same."""


class _Stopped(RuntimeError):
    """Another rank has failed."""


def play(sizes: Mapping[str, int], run: Callable[[Mapping[str, int]], T]) -> list[T]:
    """Plays all ranks of some axes, each on a thread, and gives what `run(place)` returns on each, in rank order.

    Every axis by another name has one rank there. Tensors are those of the CPU, as autograd pulls others back on one
    thread for all. The first axis is the slowest. What `run` raises on the first rank that fails is raised here.
    """
    places = [dict(zip(sizes, place, strict=True)) for place in itertools.product(*map(range, sizes.values()))]
    board, results, errors = _Board(len(places)), dict[int, T](), dict[int, BaseException]()

    def rank_main(number: int) -> None:
        player = Player(board, number, sizes, places[number])
        try:
            with during(playing, player):
                results[number] = run(places[number])
        except BaseException as error:
            errors[number] = error
        finally:
            board.end(failed=number in errors)

    thread_state.prepare_for_fakes()
    contexts = [contextvars.copy_context() for _ in places]
    threads = [
        threading.Thread(target=context.run, args=(rank_main, number), daemon=True)
        for number, context in enumerate(contexts)
    ]
    with private.shared_forward_mode():
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:
            board.end(failed=True)  # which those that have begun are told
            raise
    for number in sorted(errors, key=lambda number: (isinstance(errors[number], _Stopped), number)):
        place = ", ".join(f"{place} of axis {axis!r}" for axis, place in places[number].items())
        errors[number].add_note(f"on rank {place}, which fz plays" if place else "on one rank, as one process")
        raise errors[number]
    return [results[number] for number in range(len(places))]


class Player:
    """One rank, as its thread sees it."""

    def __init__(self, board: _Board, number: int, sizes: Mapping[str, int], place: Mapping[str, int]) -> None:
        self._board, self._number, self._sizes, self._place = board, number, sizes, place
        self._counts: dict[str, int] = {}

    def size(self, axis: str, _: int = 0) -> int:
        """The ranks of an axis; of several, which are taken as one, all."""
        return math.prod(self._sizes.get(name, 1) for name in axis.split(", "))

    def rank(self, axis: str, _: int = 0) -> int:
        """This rank's number among them."""
        out = 0
        for name in axis.split(", "):
            out = out * self._sizes.get(name, 1) + self._place.get(name, 0)
        return out

    def exchange(self, axis: str, send: Pieces, receive: Pieces, tag: Hashable) -> None:
        """Gives `send[r]` to rank r of an axis, and fills `receive[r]` with what that has sent here."""
        own, names = self.rank(axis), axis.split(", ")
        beside = tuple([place for name, place in self._place.items() if name not in names])
        count = self._counts[axis] = self._counts.get(axis, 0) + 1
        key = (axis, beside, count)
        words = f"{tag} in {send[own].dtype}"
        every = self._board.exchanged(key, own, self.size(axis), self._number, words, send)
        for rank, (target, pieces) in enumerate(zip(receive, every, strict=True)):
            if pieces[own].numel() != target.numel():
                raise Parted(
                    f"rank {own} of axis {axis!r} expects a tensor of shape {tuple(target.shape)} of rank {rank} in "
                    f"{words}, and gets one of shape {tuple(pieces[own].shape)}"
                )
            target.copy_(pieces[own].reshape(target.shape))


class _Sent:
    """One exchange: what its ranks have sent so far."""

    def __init__(self, size: int) -> None:
        self.size, self.reads = size, 0
        self.by: dict[int, tuple[str, list[torch.Tensor]]] = {}  # rank -> the words for it, a piece for each rank

    @property
    def complete(self) -> bool:
        return len(self.by) == self.size


class _Board:
    """What ranks have sent and not all have read."""

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._sent: dict[Key, _Sent] = {}
        self._waiting: dict[int, Key] = {}  # rank -> the exchange that it waits for
        self._running, self._failed = count, False

    def end(self, failed: bool) -> None:
        """Notes that a rank runs no more."""
        with self._changed:
            self._running -= 1
            self._failed = self._failed or failed
            self._changed.notify_all()

    def exchanged(self, key: Key, own: int, size: int, number: int, words: str, send: Pieces) -> list[Pieces]:
        """What each rank has sent, once all have; `own` is a number on the axis, `number` one among all ranks."""
        pieces = [piece.detach().clone() for piece in send]  # which may be written to meanwhile
        with self._changed:
            sent = self._sent.setdefault(key, _Sent(size))
            sent.by[own] = words, pieces
            self._waiting[number] = key
            if sent.complete:
                self._waiting = {each: other for each, other in self._waiting.items() if other != key}
                self._changed.notify_all()
            while not sent.complete:
                if self._failed:
                    raise _Stopped
                if len(self._waiting) == self._running:
                    calls = sorted({word for each in self._sent.values() for word, _ in each.by.values()})
                    raise Parted(f"ranks wait for one another, or for one that has ended, in {' and in '.join(calls)}")
                self._changed.wait()
            sent.reads += 1
            if sent.reads == size:
                del self._sent[key]
        said = [sent.by[rank][0] for rank in range(size)]
        for rank, word in enumerate(said):
            if word != said[0]:
                raise Parted(f"rank 0 of axis {key[0]!r} sends {said[0]}, and rank {rank} {word}")
        return [sent.by[rank][1] for rank in range(size)]
