"""Ranks that diverge get an error that names both sides, on each of them, instead of a hang or another unit's weights.

A rank that is about to communicate says what, through the store of the default process group, which no collective can
block. While it waits for the others it looks who waits for whom: ranks that wait in a circle, also over several
process groups, will wait for ever.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import json
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import ParamSpec, TypeVar

from fzero.base import texts
from fzero.base.context import during, variable
from fzero.comm import backend

P = ParamSpec("P")
T = TypeVar("T")
Records = list[tuple[str, Hashable, int]]  # operation, tag, bytes
_watch: contextvars.ContextVar[Watch | None] = variable("watch", None)
_listeners: contextvars.ContextVar[tuple[Records, ...]] = variable("listeners", ())

_FAILED = "has failed with"
KEPT = 8  # of what has happened on a rank, the last ones
_OURS = ("The ranks have diverged", "Ranks wait for one", "Communication failed on rank", "Rank ")
ADVICE = (
    "Every rank must call the same units of the same components in the same order; look for a branch that depends on "
    "the data or on the rank. A rank that has nothing for a unit (no image in its batch, say) calls it all the same: "
    "with empty inputs (x[:0]), or with a dummy, and adds its output times zero."
)


@contextlib.contextmanager
def checked_collectives(enabled: bool = True, counted: bool = False) -> Iterator[None]:
    """A context in which ranks that diverge get an error that names both sides, instead of a hang.

    Use it to find a hang, not in production: each collective costs a few more messages to the store of the default
    process group. Every rank raises `RuntimeError` if ranks call different units, wait for each other in different
    process groups, or wait for a rank that has left this context.

    Args:
        enabled: False does nothing.
        counted: count this context now, on all ranks, and not at its first collective. For a rank that may fail before
            it.

    Example:
        >>> with fz.testing.checked_collectives():
        ...     pass
    """
    watch = Watch() if enabled else None
    if watch is not None and counted:
        watch.begin()
    failed: BaseException | None = None
    try:
        with during(_watch, watch):
            yield
    except BaseException as error:
        failed = error
        raise
    finally:
        if watch is not None:
            watch.leave(failed)
        del failed


@contextlib.contextmanager
def recorded_collectives() -> Iterator[Records]:
    """A context that collects (operation, tag, bytes) of every collective of this thread, in a list.

    The tag says what it was for, such as the unit of a gather or "the loss".

    Example:
        >>> def rank_main(rank):
        ...     with fz.testing.recorded_collectives() as records:
        ...         fz.parallel.sum(torch.ones(2), fz.parallel.axis(None, "tp"))
        ...     return [(operation, size) for operation, tag, size in records]
        >>> fz.testing.run_ranks(rank_main, 2)[0]
        [('exchange', 8)]
    """
    record: Records = []
    with during(_listeners, (*_listeners.get(), record)):
        yield record


class _Silent(Records):
    def append(self, record: object) -> None:
        raise NotImplementedError(f"{record} is sent where nothing may be")


def silent() -> contextlib.AbstractContextManager[object]:
    """Inside, collectives of this library raise NotImplementedError before they send."""
    return during(_listeners, (*_listeners.get(), _Silent()))


def announce(operation: str, tag: Hashable, size: int, words: Callable[[], str], group: backend.Group) -> None:
    """Records a collective; in checked mode compares what all ranks of the group say, and raises if they differ."""
    for record in _listeners.get():
        record.append((operation, tag, size))
    watch = _watch.get()
    if watch is None:
        return
    need_alike(watch.agree(words(), group), group)


def need_alike(by_all: Sequence[str], group: backend.Group) -> None:
    """Raises RuntimeError where the ranks of a group say different things, and which."""
    if len(set(by_all)) > 1:
        listing = "; ".join(f"rank {rank}: {text}" for rank, text in zip(backend.members(group), by_all, strict=True))
        raise RuntimeError(f"The ranks have diverged: {listing}. {_advice(backend.members(group))}")


# ---- what happens on one rank alone


@contextlib.contextmanager
def failing(what: str) -> Iterator[None]:
    """Around what a rank may go on after if it fails there: should ranks diverge, others read it: that may be why."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):  # of an error whose words fail; of a store on a rank that has stopped
            text = str(error).partition("\n")[0]
            if not text.startswith(_OURS) and backend.size_of(backend.world()) > 1:  # which all ranks are told
                known = _happened(rank := backend.global_rank())
                said = f"{what} failed with {type(error).__name__}: {text[:300]}"
                backend.store().set(f"fzero/happened/{rank}", json.dumps([*known, said][-KEPT:]))
        raise


def tell_of_refusal(run: str, words: str) -> None:
    """Tells the other ranks of `Axis.run` that this one refuses it, before it sends what they may wait for."""
    with contextlib.suppress(RuntimeError):  # the store was on a rank that has stopped
        backend.store().set(f"fzero/refused/{run}", f"Rank {backend.global_rank()} has refused this run. {words}")


def refusal_of(run: str) -> str | None:
    """What another rank has said by `tell_of_refusal`, before it sent anything that has arrived here."""
    with contextlib.suppress(RuntimeError):
        store, key = backend.store(), f"fzero/refused/{run}"
        return store.get(key).decode() if store.check([key]) else None
    return None


def _happened(rank: int) -> list[str]:
    store, key = backend.store(), f"fzero/happened/{rank}"
    return json.loads(store.get(key)) if store.check([key]) else []


def _alone(ranks: Sequence[int]) -> str:
    """What has happened on some of these ranks and not on others."""
    try:
        known = {rank: _happened(rank) for rank in ranks}
    except RuntimeError:
        return ""
    common = set.intersection(*map(set, known.values()))
    told = [f"on rank {rank} {what}" for rank, own in known.items() for what in own if what not in common]
    return f"What has happened on some ranks alone: {'; '.join(told)}. " if told else ""


def _advice(ranks: Sequence[int]) -> str:
    told = _alone(ranks)
    if not told:
        return ADVICE
    return (
        f"{told}That may be why: a rank that goes on after an error has not sent what others wait for, and a unit that "
        f"sends messages sends them anew where it begins again. Let all ranks end, or go on, together. {ADVICE}"
    )


class PeerStopped(RuntimeError):
    """This rank waits for one that has stopped; its own error, if there is one, says more."""


class Watch:
    """The collective that one rank has arrived at, where all ranks can read it."""

    LOOK = 0.05  # seconds between two looks at who waits for whom

    def __init__(self) -> None:
        self._prefix: str | None = None
        self._counts: dict[str, int] = {}
        self._stuck = False

    def agree(self, words: str, group: backend.Group) -> list[str]:
        """The words of every rank of the group at this point, in group order."""
        store, me, members = backend.store(), backend.global_rank(), backend.members(group)
        self.begin()
        name = backend.name_of(group)
        count = self._counts[name] = self._counts.get(name, 0) + 1
        store.set(self._key(name, count, me), words)
        store.set(f"{self._prefix}/at/{me}", json.dumps([name, count, members, words]))
        keys = [self._key(name, count, rank) for rank in members]
        started = looked = time.monotonic()
        pause = 2e-5
        while not store.check(keys):
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)
            if time.monotonic() - looked > self.LOOK:
                self._look(store, me)
                looked = time.monotonic()
            if looked - started > backend.timeout_of(group):
                self._stuck = True
                missing = [rank for rank, key in zip(members, keys, strict=True) if not store.check([key])]
                raise RuntimeError(
                    f"Rank {me} waited {looked - started:.0f} seconds, the timeout of its process group, in {words} "
                    f"for ranks {missing}, which did not come. {_advice(members)}"
                )
        if count > 2:  # whoever is here has read what was said two rounds ago
            store.delete_key(self._key(name, count - 2, me))
        return [store.get(key).decode() for key in keys]

    def begin(self) -> None:
        """Counts this watch, once."""
        if self._prefix is None:  # of one generation of watches: all ranks have entered equally often
            count = backend.store().add(f"fzero/watches/{backend.global_rank()}", 1)
            self._prefix = f"fzero/{count}"

    def _key(self, name: str, count: int, rank: int) -> str:
        return f"{self._prefix}/{name}/{count}/{rank}"

    def _look(self, store: backend.Store, me: int) -> None:
        """Raises where this rank waits for ranks that will never come."""
        waits = self._waits(store)
        gone = {rank: end for rank, (_, count, _, end) in waits.items() if count < 0}
        # read after all of `waits`: whoever is missing here was missing all along
        missing = {
            rank: [other for other in members if not store.check([self._key(name, count, other)])]
            for rank, (name, count, members, _) in waits.items()
            if count > 0
        }
        # a rank that has gone on meanwhile was not stuck, and what was said to it may have been deleted since
        still = self._waits(store)
        stuck = {rank for rank in missing if still.get(rank) == waits[rank]}
        while free := {rank for rank in stuck if not any(other in stuck or other in gone for other in missing[rank])}:
            stuck -= free
        if me not in stuck:
            return
        self._stuck = True
        listing = [f"rank {rank} is in {waits[rank][3]} and waits for ranks {missing[rank]}" for rank in sorted(stuck)]
        listing += [f"rank {rank} {end}" for rank, end in sorted(gone.items())]
        said = "; ".join(listing)
        if any(end.startswith(_FAILED) for end in gone.values()):
            raise PeerStopped(f"Ranks wait for one that has failed, whose own error says more: {said}.")
        error = PeerStopped if gone else RuntimeError
        raise error(f"The ranks have diverged and wait for one another: {said}. {_advice([*waits])}")

    def _waits(self, store: backend.Store) -> dict[int, tuple[str, int, list[int], str]]:
        """Rank -> where it is: the group, its count of collectives (negative: it has gone), its ranks, the words."""
        keys = {rank: f"{self._prefix}/at/{rank}" for rank in range(backend.size_of(backend.world()))}
        return {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}

    def leave(self, failed: BaseException | None) -> None:
        """Tells those who still wait for this rank, or will, that it will not come."""
        if self._stuck or not backend.initialized():
            return
        if failed is not None:  # maybe before its first collective
            self.begin()
        if self._prefix is not None:
            end = "has finished" if failed is None else f"{_FAILED} {type(failed).__name__}: {failed}"
            backend.store().set(f"{self._prefix}/at/{backend.global_rank()}", json.dumps(["", -1, [], end]))


def explained(call: Callable[P, T], words: Callable[[], str], group: backend.Group) -> Callable[P, T]:
    """`call`, naming what failed: a timeout of the backend knows neither the unit nor what the others were doing."""

    def explaining(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            if texts.is_out_of_memory(error):
                raise  # of this rank; the others are not to blame
            raise RuntimeError(
                f"Communication failed on rank {backend.global_rank()}, in {words()}: another rank has stopped, or "
                f"has called other units than this one. {_failed_elsewhere(words(), group)}"
                f"{_alone(backend.members(group))}{ADVICE} Run the step inside "
                f"fz.testing.checked_collectives() to see at once what every rank called. ({error})"
            ) from error

    return explaining


def _failed_elsewhere(words: str, group: backend.Group) -> str:
    """The collectives that failed on the other ranks, which time out at about the same moment."""
    try:
        store, me = backend.store(), backend.global_rank()
        store.set(f"fzero/failed/{me}", words)
        keys = {rank: f"fzero/failed/{rank}" for rank in backend.members(group) if rank != me}
        with contextlib.suppress(RuntimeError):  # some of them do not fail
            store.wait(list(keys.values()), datetime.timedelta(seconds=0.5))
        found = {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
    except RuntimeError:  # the store was on the rank that stopped
        return ""
    return "".join(f"Rank {rank} was in {text}. " for rank, text in sorted(found.items()))
