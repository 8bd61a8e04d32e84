"""Buffers in flight while one run's units compute: the next unit's gather, the last unit's reduction.

Units are gathered ahead in the order that the last run of the same function called them, which is the same on every
rank; the pullback goes back through this run's own calls. Owned by one run; nothing of it outlives that run's graph.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Protocol

import torch

from fzero.base import pages, private
from fzero.comm import hazards
from fzero.comm.backend import finish_all
from fzero.engine.use import Use
from fzero.formats.formats import Stored
from fzero.table.layout import Key
from fzero.table.placements import FirstRun, form_of

Keys = tuple[Key, ...]


class Record:
    """The calls of a function's last run, in order, and what is known of them.

    Attributes:
        signatures: by a call's number, those that were proven.
        first_runs: what those on slices showed, by what the function was given.
    """

    def __init__(self) -> None:
        self.order: tuple[Keys, ...] | None = None
        self.signatures: dict[int, list[object]] = {}
        self.first_runs: dict[object, FirstRun] = {}
        self.as_nodes: set[object] = set()  # the code of plain units that functorch refuses


def first_runs(
    records: Mapping[object, Mapping[tuple[object, ...], object]], fn: object, derived: bool, given: object
) -> dict[object, FirstRun]:
    """What first runs of a function on slices showed, of those that were differentiated as a traced one is.

    Args:
        given: what it is given, as `noted` takes it.
    """
    form, known = form_of(given), list[dict[object, FirstRun]]()
    with contextlib.suppress(TypeError):  # of a callable that cannot be referred to weakly
        found = records.get(fn, {}).items()
        known = [x.first_runs for key, x in found if isinstance(x, Record) and key[1] == derived]
    return next((own for own in known if form in own), {})


class Running(Protocol):
    """A unit's call, as far as its run's schedule calls back; see `UnitOp`."""

    number: int
    used: bool
    keys: Keys
    node: weakref.ref[torch.autograd.graph.Node] | None

    def gather_ahead(self) -> None: ...
    def fetch_ahead(self) -> None: ...
    def forget_ahead(self) -> None: ...
    def forget(self) -> None: ...


def _gone() -> None:
    """Stands for a reference to a call that nothing runs any more."""


@contextlib.contextmanager
def _ended_by(end: Callable[[], None]) -> Iterator[None]:
    """`end()` afterwards, also after an error, which counts more than one of `end`'s."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):
            end()
        raise
    end()


class Schedule:
    """The buffers in flight of one run.

    Attributes:
        keeps: whether the unit that is gathered last stays for the pullback. Not where many runs wait for theirs.
        ran_before: whether the function has run to its end before.
        used: how often each group has been.
        frees: whether a unit that runs again waits for the reductions in flight first, whose buffers are free then.
    """

    def __init__(self, uses: Mapping[Key, Use]) -> None:
        self.uses = uses
        self._pulls = False
        self._before: Callable[[Sequence[Key]], object] | None = None
        self.keeps, self.ran_before, self.frees = True, False, False
        self._gathers = self._fetches = False  # whether some group is, or is fetched for that
        for use in uses.values():
            self._gathers = self._gathers or use.transient
            self._fetches = self._fetches or (use.gathers and use.fetches)
        self._calls: list[Callable[[], Running | None]] = []
        self._called: list[Keys] = []
        self.used = dict.fromkeys(uses, 0)
        self._expected: tuple[Keys, ...] = ()
        self._on_track = True  # called so far what was expected
        self.record = Record()
        self._fetching: dict[Key, Callable[[], Stored]] = {}  # whose gather has not begun
        self._ahead: dict[Key, tuple[torch.Tensor, Callable[[], None]]] = {}
        self._kept: dict[Key, torch.Tensor] = {}
        self._reducing: dict[Key, Callable[[], None]] = {}  # groups of one unit

    # ---- forward

    def expect(self, records: MutableMapping[object, dict[object, Record]], fn: object, form: object) -> None:
        """Looks up what the last run of `fn` called, and will note there what this one calls.

        Args:
            form: what this run is asked for; of another one it shows little (a forward alone, other derivatives).
        """
        with contextlib.suppress(TypeError):  # a callable that cannot be referred to weakly is not looked ahead of
            self.record = records.setdefault(fn, {}).setdefault(form, self.record)
        self.ran_before = self.record.order is not None
        self._expected = self.record.order or ()

    def called(self, keys: Keys, op: Running | None = None) -> int:
        """Notes a call, and what runs it, which can be pulled back; its number."""
        count = len(self._called)
        for key in keys:
            self.used[key] += 1
        self._on_track = self._on_track and count < len(self._expected) and self._expected[count] == keys
        self._called.append(keys)
        self._calls.append(_gone if op is None else weakref.ref(op))
        return count

    def note_use(self, keys: Sequence[Key]) -> None:
        """Notes a use of groups; or a derivative of one, which comes through the graph and so at an unknown time."""
        for key in keys:
            self.used[key] += 1

    def signatures(self) -> tuple[int, list[object]]:
        """The number of the next call, and the signatures under which earlier runs of it were proven."""
        count = len(self._called)
        return count, self.record.signatures.get(count, [])

    def note(self, number: int, signature: object, kept: int) -> None:
        """Notes the signature of a call that was proven; the latest of them are kept."""
        known = self.record.signatures.setdefault(number, [])
        known[:] = [signature, *known[: kept - 1]]

    def is_last(self) -> bool:
        """Tells whether the call that runs is probably the last of the forward, and may keep its buffers."""
        return self.keeps and len(self._called) == len(self._expected) and self._on_track

    def gather_next(self) -> None:
        """Starts the gather of the unit that will probably be called after the one that runs."""
        count = len(self._called)
        if self._gathers and self._on_track and count < len(self._expected):
            self.gather_ahead(self._expected[count])
            if self._fetches and count + 1 < len(self._expected):
                self.fetch_ahead(self._expected[count + 1])

    def fetch_ahead(self, keys: Sequence[Key]) -> None:
        """Starts to bring shards to the device that will be gathered next but one: a gather must wait for them."""
        for key in keys:
            use, begun = self.uses[key], (self._fetching, self._ahead, self._kept)
            if use.gathers and use.fetches and not any(key in each for each in begun):
                self._fetching[key] = use.start_fetch()

    def gather_ahead(self, keys: Sequence[Key]) -> None:
        for key in keys:
            if self.uses[key].transient and key not in self._ahead and key not in self._kept:
                self._ahead[key] = self._gather(key)

    def keep(self, key: Key, full: torch.Tensor) -> None:
        """Holds on to a gathered buffer for its next use."""
        self._kept[key] = full

    def take(self, key: Key) -> tuple[torch.Tensor, bool]:
        """A unit's full buffer, gathered ahead or now, and whether it is the unit's own, which it may empty."""
        use = self.uses[key]
        if not use.transient:
            return use.value(), False
        if key in self._kept:
            return self._kept.pop(key), True
        full, wait = self._ahead.pop(key, None) or self._gather(key)
        wait()
        return full, True

    def _gather(self, key: Key) -> tuple[torch.Tensor, Callable[[], None]]:
        """Starts to gather a group into a new buffer."""
        use = self.uses[key]
        with private.outside_inference():  # a unit that is called outside of it may use what was gathered ahead inside
            full = use.empty()
            return full, self._fill(key, full)

    def _fill(self, key: Key, full: torch.Tensor) -> Callable[[], None]:
        # a call's own graph saved views of its buffer, and is pulled back with the same values in it
        with private.preserve_version([full]), torch.no_grad():
            return self.uses[key].start_into(full, self._fetching.pop(key, None))

    def refill(self, key: Key, full: torch.Tensor) -> Callable[[], None]:
        """Starts to gather a group again into the buffer that a call's own graph refers to."""
        storage = full.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(full.numel() * full.element_size())
            pages.in_large_pages(full)
        return self._fill(key, full)

    @staticmethod
    def empty(full: torch.Tensor) -> None:
        """Gives back the memory of a call's buffer, which its graph still refers to."""
        storage = full.untyped_storage()
        if not hazards.poison(full) and storage.resizable():  # it is not where numpy sees it too
            storage.resize_(0)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around the function's run. What is in flight at its end is waited for, or it would meet later messages."""
        with _ended_by(self._end_of_gathers):
            yield
        self.record.order = tuple(self._called)
        self._expected = ()

    def calls(self) -> list[Running]:
        """Returns what runs the calls, in order, as far as it lives."""
        return [op for reference in self._calls if (op := reference()) is not None]

    def forget_calls(self) -> None:
        """Lets go of calls that nobody will pull back."""
        for op in self.calls():
            if not op.used:
                op.forget()

    # ---- pullback

    def gather_previous(self, op: Running) -> None:
        """Starts the gather of the unit that will probably be pulled back after `op`."""
        if self._before is not None:
            self._before(self._called[op.number])
        previous = self._calls[op.number - 1]() if self._pulls and op.number > 0 else None
        if previous is not None:
            previous.gather_ahead()
        before = self._calls[op.number - 2]() if self._fetches and self._pulls and op.number > 1 else None
        if before is not None:
            before.fetch_ahead()

    def make_room(self, key: Key) -> None:
        """Before the full cotangent of a group is made: then nothing but its unit's other groups is in flight."""
        if self._reducing and (key in self._reducing or any(other.unit != key.unit for other in self._reducing)):
            self.finish_reductions()

    def reduce(self, key: Key, full: torch.Tensor, then: Callable[[torch.Tensor], None]) -> None:
        """Starts to reduce a full cotangent; this rank's share of it is given to `then`, once it is there.

        Args:
            full: in the dtype that travels; it is not the caller's any more.
            then: called by the next `finish_reductions` at the latest: nobody else knows the share before.
        """
        use = self.uses[key]
        if use.axis.ranks == 1:
            then(full)
            return
        mean, wait = use.axis.start_reduce_scatter(full, use.tag, use.reduce)

        def finish() -> None:
            wait()
            hazards.poison(full)
            then(mean)

        self._reducing[key] = finish

    def finish_reductions(self) -> None:
        """Waits for the reductions in flight, which are those of one unit, and whose buffers are then free."""
        if self._reducing:
            reducing, self._reducing = self._reducing, {}
            finish_all(list(reducing.values()))

    @contextlib.contextmanager
    def pullback(self, before: Callable[[Sequence[Key]], object] | None = None) -> Iterator[None]:
        """Around a whole pullback; outside of one nothing is gathered ahead of one, as its end would be unknown.

        Args:
            before: told which groups' unit is about to be pulled back.
        """
        with _ended_by(self._end_of_pullback):
            self._pulls, self._before = True, before
            try:
                yield
            finally:
                self._pulls, self._before = False, None

    def _end_of_gathers(self) -> None:
        ahead, self._ahead = self._ahead, {}
        fetching, self._fetching = self._fetching, {}
        with private.below_transforms():  # what arrives is written to buffers that no level knows
            finish_all([*fetching.values(), *[wait for _, wait in ahead.values()]])

    def _end_of_pullback(self) -> None:
        """Waits for everything in flight: also for what was gathered ahead and not used."""
        calls = self.calls()
        finish_all([self.finish_reductions, *[op.forget_ahead for op in calls], self._end_of_gathers])
        self._kept.clear()
