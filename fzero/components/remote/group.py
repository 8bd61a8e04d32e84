"""A component's ranks as the controlling process has them: messages to all in one order, and what they report."""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fzero.base.interrupts import kept_back
from fzero.components.remote.failure import ComponentDied, Failed, Failure, error_of, first_of, left_waiting
from fzero.components.remote.layout import Layout
from fzero.components.remote.link import NOTICED, Arguments, Link, Message, Place, Settings
from fzero.components.remote.pull import Leaf, Puller, Table, whole
from fzero.components.remote.values import Digest, Name, apart, unlike

Starts = Callable[[Callable[..., object]], Sequence[Link]]
GRACE = 2.0  # seconds that a rank has to end by itself


class Group:
    """The ranks of one component. Nothing here holds the component: when nobody does, it is closed."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.links: Sequence[Link] = ()
        self.died: ComponentDied | None = None  # why the component is lost, once it is
        self.closed = False
        self._ended, self._process = False, os.getpid()
        self.places = [Place()] * settings.ranks  # of each
        self._given: dict[int, list[Digest]] = {}  # of each rank, where others share its examples: of its params
        self.puller = Puller()
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._news = threading.Condition()
        self._in_doubt = threading.Event()  # whether a rank has found its process group broken
        self._ready: set[int] = set()
        self._broken: list[Failure] = []
        self._holds: dict[int, list[Any]] = {}  # call -> ranks that have not got its operands yet, and these
        self.failures: dict[int, Failure] = {}  # of calls that are known to have failed
        self._known: set[str] = set()  # components whose tables the ranks have
        self._readers: weakref.WeakSet[Group] = weakref.WeakSet()  # those whose ranks have this one's
        _groups[settings.identity] = self
        self._frees: queue.SimpleQueue[tuple[int, int] | str | None] = queue.SimpleQueue()

    # ---- start and end

    def start(self, starts: Starts) -> None:
        """Starts the ranks, and waits until all have built their step."""
        settings = self.settings
        self.links = starts(self.heard)
        is_up = lambda: bool(self._broken) or self.died is not None or len(self._ready) == settings.ranks
        try:
            with self._news:
                arrived = self._news.wait_for(is_up, settings.timeout)
                if self._broken:
                    raise error_of(first_of(self._broken))
                if self.died is not None:
                    raise copy.copy(self.died)
                if not arrived:
                    missing = sorted({*range(settings.ranks)} - self._ready)
                    raise TimeoutError(
                        f"fz.remote: ranks {missing} of component {settings.component!r} were not ready after "
                        f"{settings.timeout:g} seconds; expected build to end by then. Give a longer timeout=."
                    )
            self._need_grid()
        except BaseException:
            self.close()
            raise
        own = self.table(None)
        self.puller.tables[settings.identity] = own
        for link in self.links:
            link.send(("table", settings.identity, self.table(link)))
        arguments = (self._frees, self.links)
        threading.Thread(target=_carry, args=arguments, name=f"fzero-free-{settings.component}", daemon=True).start()

    def _need_grid(self) -> None:
        """Refuses ranks of which some piece of a tensor would have no owner, or more of them than others have."""
        first = self.places[0]
        axes = [name for name, _, _ in first.axes]
        like = [
            (place.averaged, place.batch, place.means, [(name, n) for name, _, n in place.axes])
            for place in self.places
        ]
        seats = collections.Counter([(place.piece(axes)[0], place.mean_rank) for place in self.places])
        pieces = {place.piece(axes)[0] for place in self.places}
        by_mean = {(place.piece(first.averaged)[0], place.mean_rank) for place in self.places}
        copies = collections.Counter([piece for piece, _ in by_mean])
        whole = len(pieces) == first.piece(axes)[1] and len(by_mean) == first.means
        uneven = len({*seats.values()}) > 1 or len({*copies.values()}) > 1
        if any(each != like[0] for each in like) or uneven or not whole:
            raise ValueError(
                f"fz.remote: the ranks of component {self.settings.component!r} have the places {self.places} in "
                "batches and means; expected each place on as many ranks as any other. Give every rank the same "
                "mesh and axis."
            )
        differs = apart([(leaf, digest) for own in self._given.values() for leaf, digest in enumerate(own)])
        if differs is not None:
            raise ValueError(unlike(self.settings.component, f"leaf {differs[0]} of the params of build", differs[1]))

    def close(self) -> None:
        """Ends the ranks; more than once does no harm, and is right after an interrupt. A forked child ends nothing."""
        if not self._is_here() or self._ended:
            return
        with self._lock:
            first, self.closed = not self.closed, True
        try:
            if first:
                self._is_over()
                for link in self.links:
                    with contextlib.suppress(OSError):
                        link.send(("close",))
            deadline = time.monotonic() + GRACE
            for link in self.links:
                link.join(max(0.0, deadline - time.monotonic()))
        finally:
            for link in self.links:
                link.end()
        self._ended = True

    def _is_over(self) -> None:
        """Lets go of what was kept for the ranks, and others' ranks of what they know of these."""
        self._frees.put(None)
        self._holds.clear()
        for reader in [*self._readers]:
            reader._frees.put(self.settings.identity)
            reader._known.discard(self.settings.identity)

    def _is_here(self) -> bool:
        """Whether this is the process that started the ranks, and not one that was forked from it."""
        return os.getpid() == self._process

    def die(self, rank: int, cause: str, words: str = "") -> None:
        """Notes that a rank has ended, the first of them, and ends the others."""
        if not self._is_here():
            return
        with self._lock:
            if self.died is not None or self.closed:
                return
            self.died = ComponentDied(self.settings.component, rank, cause, words)
        for link in self.links:
            link.end()
        self._is_over()
        with self._news:
            self._news.notify_all()

    # ---- messages

    def call(
        self, verb: str, arguments: Arguments, held: Sequence[object] = (), own: Sequence[Arguments] = (), key: int = -1
    ) -> int:
        """Sends a call to all ranks, and returns its number.

        Args:
            held: what must live until all ranks have their operands.
            own: further arguments of each rank.
            key: of the trees that it returns, which are the same for all calls of one key.
        """
        self.need_alive()  # before the lock, which a forked child may have as another thread held it
        number = None
        try:
            with kept_back():  # a rank that had a call which others have not would wait for them
                number = self._sent(verb, arguments, held, own, key)
        except BaseException:
            if number is not None:  # an interrupt: nobody will ask for what the call makes
                self.forget(number, -1)
            raise
        return number

    def _sent(self, verb: str, arguments: Arguments, held: Sequence[object], own: Sequence[Arguments], key: int) -> int:
        with self._lock:
            self.need_alive()
            number = next(self._numbers)
            if held:
                arguments = {**arguments, "refers": True}
                self._holds[number] = [set(range(len(self.links))), list(held)]
            sent = 0
            try:
                for rank, link in enumerate(self.links):
                    mine = {**arguments, **own[rank]} if own else arguments
                    link.send(("call", number, verb, mine, key if key >= 0 else None))
                    sent += 1
            except BaseException as error:
                self._holds.pop(number, None)
                if isinstance(error, OSError):
                    self._lost(sent, error)
                if sent or not isinstance(error, Exception):  # of which nobody knows when it came
                    self.die(sent, "has perhaps not got a call that others have")
                raise
            return number

    def _lost(self, rank: int, error: OSError) -> None:
        with self._news:
            self._news.wait_for(lambda: self.died is not None, 1.0)
        if self.died is None:  # its end may be noticed late on a busy machine
            link = self.links[rank]
            link.join(5 * NOTICED)
            self.die(rank, *(link.gone() or (f"cannot be reached ({error})", "")))
        self.need_alive()

    def need_alive(self) -> None:
        """Refuses where the component is lost or closed, or another process's."""
        if not self._is_here():
            raise RuntimeError(
                f"Component {self.settings.component!r} belongs to process {self._process}, and this one "
                f"({os.getpid()}) was forked from it: nobody answers here. Use it in that process, and give children "
                "fetched tensors, or make a component of their own there."
            )
        if self._in_doubt.is_set():  # it will be known in a moment
            with self._news:
                self._news.wait_for(lambda: self.died is not None or self.closed, 2 * NOTICED)
        if self.died is not None:
            raise copy.copy(self.died)
        if self.closed:
            raise RuntimeError(f"Component {self.settings.component!r} was closed; expected one that is open.")

    def forget(self, call: int, place: int) -> None:
        """Lets the ranks forget a value; at any time, also in the midst of anything else."""
        self._frees.put((call, place))

    def heard(self, rank: int, message: Message) -> None:
        """What a rank reports."""
        kind = message[0]
        if kind == "fetched":
            hold = self._holds.get(message[1])
            if hold is not None:
                hold[0].discard(rank)
                if not hold[0]:
                    self._holds.pop(message[1], None)
        elif kind == "failed":
            failure: Failure = message[2]
            if len(self.failures) > 10_000:
                self.failures.clear()
            if not failure.follows:
                self.failures.setdefault(message[1], failure)
            if failure.broken:
                self._left_alone(rank, failure, self.failures.get(message[1]))
        elif kind == "died":
            self.die(rank, *message[1:])
        else:
            with self._news:
                if kind == "ready":
                    self.places[rank], self._given[rank] = message[1:]
                    self._ready.add(rank)
                else:
                    assert kind == "broken", kind
                    self._broken.append(message[1])
                self._news.notify_all()

    def _left_alone(self, rank: int, failure: Failure, first: Failure | None) -> None:
        """A rank waited for another in vain: its process group is lost, as that one has died, or failed in the call."""
        self._in_doubt.set()
        deadline = time.monotonic() + (0.0 if self.links[rank].local else NOTICED)
        while self.died is None and time.monotonic() < deadline:
            time.sleep(0.02)  # the end of its process is noticed at about the same time
        if first is None:
            self.die(rank, f"was left alone in a collective: {failure.message}", failure.trace)
        else:
            self.die(first.rank, *left_waiting(first, f"for which rank {rank} waited in a collective"))

    # ---- values

    def table(self, reader: Link | None) -> Table:
        """Where this component's values are, for this process or for what is sent to a rank."""
        local = reader is None or reader.local
        return Table(self.settings.component, self.places, [link.source(local) for link in self.links])

    def know(self, other: Group) -> None:
        """Tells this component's ranks where another's values are, once."""
        identity = other.settings.identity
        if other is self or identity in self._known:
            return
        with kept_back(), self._lock:
            for link in self.links:
                with contextlib.suppress(OSError):
                    link.send(("table", identity, other.table(link)))
            self._known.add(identity)
            other._readers.add(self)
        if other.closed or other.died is not None:  # meanwhile
            other._is_over()

    def trees(self, number: int, first: bool = False, ranks: int | None = None) -> Any:
        """What a call has returned, without the tensors: the same on all ranks.

        Args:
            first: it is of a kind: its outputs must fit together.
            ranks: of the first ones only, as others have other trees.
        """
        self.need_alive()
        found: list[Any] = []
        failures: list[Failure] = []
        with self._told():
            for source in self.puller.tables[self.settings.identity].sources[:ranks]:
                told = source.trees(number)
                failures += [told] if isinstance(told, Failure) else []
                found.append(told)
        if failures:
            # of a process group that is broken the component's death, which says why
            raise self.error(next((each for each in failures if each.broken), first_of(failures)))
        trees, places = zip(*found, strict=True)
        if any(tree != trees[0] for tree in trees):
            raise ValueError(
                f"component {self.settings.component!r}: the function returned different structures on its ranks: "
                f"{trees}; expected the same on all. Return the same containers, and what differs as tensors."
            )
        if first:
            with self._told():
                self.puller.layouts(self.settings.identity, [(number, place) for place in places[0]])
        return trees[0]

    def layout_of(self, name: Name) -> Layout:
        """The layout of a value, waited for."""
        self.need_alive()
        with self._told():
            return self.puller.layouts(self.settings.identity, [name])[0]

    def fetched(self, leaf: Leaf) -> torch.Tensor:
        """The whole of a value, waited for: a new tensor."""
        self.need_alive()
        with self._told():
            (tensor,) = self.puller.pulled([(leaf, whole)])
        return tensor.clone()  # it may be the very value that lies there

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What a rank could not make is raised as its error."""
        try:
            yield
        except Failed as failed:
            raise self.error(failed.failure) from None

    def error(self, failure: Failure) -> Exception:
        """What is raised of a failure: of a component that died, what is known of its death."""
        if self.died is not None:  # perhaps of this failure
            return copy.copy(self.died)
        if failure.kind == "ComponentDied" or failure.broken:
            group = _groups.get(failure.lost)
            if group is not None:
                with group._news:
                    group._news.wait_for(lambda: group.died is not None or group.closed, 2 * NOTICED)
                if group.died is not None:
                    return copy.copy(group.died)
        return error_of(failure)


_groups: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()  # by identity: whose death it was


def _carry(frees: queue.SimpleQueue[tuple[int, int] | str | None], links: Sequence[Link]) -> None:
    """Tells the ranks what nobody needs any more: values, and where those of another component were."""
    going = True
    while going:
        batch = [frees.get()]
        with contextlib.suppress(queue.Empty):
            while len(batch) < 1000:
                batch.append(frees.get_nowait())
        going = None not in batch
        names = [name for name in batch if isinstance(name, tuple)]
        messages: list[Message] = [("gone", name) for name in batch if isinstance(name, str)]
        for link in links:
            with contextlib.suppress(OSError):
                for message in [*messages, ("free", names)] if names else messages:
                    link.send(message)
