"""What is in flight while one run's units compute: the next unit's gather, the last unit's reduction.

Units are gathered ahead in the order that the last run of the same function called them, which is the same on every
rank; the pullback goes back through this run's own calls. Owned by one run; nothing of it outlives that run's graph.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from fzero import _private
from fzero._use import Use

if TYPE_CHECKING:
    from fzero._unit import UnitOp

Keys = tuple[str, ...]


class Room:
    """Memory for a gathered buffer, which like units take turns in: fresh memory costs more than what is gathered.

    Attributes:
        full: the buffer; its storage is empty while nobody needs it.
        user: the call whose params it holds, or will.
        busy: whether that call still needs them.
    """

    __slots__ = ("busy", "full", "user")

    def __init__(self, full: torch.Tensor) -> None:
        self.full, self.busy = full, True
        self.user: weakref.ref[UnitOp] | None = None

    @property
    def is_empty(self) -> bool:
        return self.full.untyped_storage().nbytes() == 0

    def empty(self) -> None:
        self.full.untyped_storage().resize_(0)

    def fill(self) -> None:
        """Takes memory again."""
        if self.is_empty:
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())


class Schedule:
    """The buffers in flight of one run.

    Attributes:
        keeps: whether the unit that is gathered last stays for the pullback. Not where many runs wait for theirs.
        ran_before: whether the function has run to its end before.
        lean: whether memory counts more than that it stays warm: nothing is kept for a next unit.
    """

    def __init__(self, uses: Mapping[str, Use]) -> None:
        self.uses = uses
        self._pulls, self._defers = False, False
        self.keeps, self.ran_before, self.lean = True, False, False
        self._calls: list[weakref.ref[UnitOp]] = []
        self._called: list[Keys] = []
        self._uses_of: collections.Counter[str] = collections.Counter()
        self._expected: tuple[Keys, ...] = ()
        self._on_track = True  # called so far what was expected
        self._remember: Callable[[tuple[Keys, ...]], None] = lambda order: None
        self._rooms: list[Room] = []  # those that have memory
        self._keeps_rooms = False  # between calls: where more of them are expected
        self._ahead: dict[str, tuple[Room, Callable[[], None]]] = {}
        self._kept: dict[str, Room] = {}
        self._reducing: Callable[[], None] | None = None
        self._spare: torch.Tensor | None = None

    # ---- forward

    def expect(self, orders: MutableMapping[Any, tuple[Keys, ...]], fn: Any) -> None:
        """Looks up what the last run of `fn` called, and will note there what this one calls."""
        try:
            self._expected = orders.get(fn, ())
        except TypeError:  # a callable that cannot be referred to weakly is not looked ahead of
            return
        self._remember = lambda order: orders.__setitem__(fn, order)
        self.ran_before = fn in orders

    def called(self, op: UnitOp) -> int:
        """Notes a call; its number."""
        self._calls.append(weakref.ref(op))
        count, keys = len(self._called), tuple(op.keys)
        self._on_track = self._on_track and count < len(self._expected) and self._expected[count] == keys
        self._called.append(keys)
        self._uses_of.update(op.keys)
        return len(self._calls) - 1

    def is_last(self) -> bool:
        """Whether the call that runs is probably the last of the forward, and may keep its buffers."""
        return self.keeps and len(self._called) == len(self._expected) and self._on_track

    def gather_next(self) -> None:
        """Starts the gather of the unit that will probably be called after the one that runs."""
        count = len(self._called)
        if self._on_track and count < len(self._expected):
            self.gather_ahead(self._expected[count])

    def gather_ahead(self, keys: Keys) -> None:
        for key in keys:
            if self.uses[key].gathers and key not in self._ahead and key not in self._kept:
                self._ahead[key] = self._gather(key)

    def keep(self, key: str, room: Room) -> None:
        """Holds on to a gathered buffer for its next use."""
        self._kept[key] = room

    def take(self, key: str, primal: torch.Tensor) -> tuple[torch.Tensor, Room | None]:
        """A unit's full buffer, and the room that it is in: gathered ahead, or now."""
        use = self.uses[key]
        if not use.gathers:
            return use.value(primal)[0], None
        if key in self._kept:
            room = self._kept.pop(key)
        else:
            room, wait = self._ahead.pop(key, None) or self._gather(key)
            wait()
        return room.full, room

    def _gather(self, key: str) -> tuple[Room, Callable[[], None]]:
        """Starts to gather a group into a room that is free, or a new one."""
        use = self.uses[key]
        numel = use.shard.numel() * use.axis.size
        for room in self._rooms:
            if not room.busy and (room.full.numel(), room.full.dtype) == (numel, use.compute):
                room.busy, room.user = True, None
                break
        else:
            room = Room(torch.empty(numel, dtype=use.compute, device=use.shard.device))
            self._rooms.append(room)
        return room, self._fill(key, room)

    def _fill(self, key: str, room: Room) -> Callable[[], None]:
        # calls that used this room before saved views of it, and will have it filled again before they are pulled back
        with _private.preserve_version([room.full]), torch.no_grad():
            return self.uses[key].start_into(room.full)

    def refill(self, key: str, room: Room, op: UnitOp) -> Callable[[], None]:
        """Starts to gather a group into the room that a call's own graph refers to; whoever is in it loses it."""
        user = room.user() if room.user is not None else None
        if user is not None and user is not op:
            user.lose(room)
        if room.is_empty:
            room.fill()
            self._rooms.append(room)
        room.busy, room.user = True, weakref.ref(op)
        return self._fill(key, room)

    def release(self, room: Room, op: UnitOp) -> None:
        """What a call had in the room is not needed any more; its memory is kept for the next call, if that fits in."""
        room.busy = False
        if self.lean or not (self._keeps_rooms and room.full.numel() in self._sizes_after(op)):
            room.empty()
            self._rooms = [other for other in self._rooms if other is not room]

    def _sizes_after(self, op: UnitOp) -> set[int]:
        """Elements of the full buffers of the call that will probably follow this one."""
        keys: Keys = ()
        if self._pulls:
            previous = self._calls[op.number - 1]() if op.number > 0 else None
            keys = tuple(previous.keys) if previous is not None else ()
        elif self._on_track and len(self._called) < len(self._expected):
            keys = self._expected[len(self._called)]
        elif not self._expected:  # a first run: units are mostly alike
            keys = tuple(op.keys)
        return {self.uses[key].shard.numel() * self.uses[key].axis.size for key in keys}

    def empty_rooms(self) -> None:
        """Gives back the memory of the rooms that nobody is in."""
        for room in self._rooms:
            if not room.busy:
                room.empty()
        self._rooms = [room for room in self._rooms if room.busy]

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around the function's run. What is in flight at its end is waited for, or it would meet later messages."""
        self._keeps_rooms = True
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self._end_of_gathers()
            raise
        finally:
            self._keeps_rooms = False
        self._end_of_gathers()
        self._remember(tuple(self._called))
        self._expected = ()

    # ---- pullback

    def gather_previous(self, op: UnitOp) -> None:
        """Starts the gather of the unit that will probably be pulled back after `op`."""
        previous = self._calls[op.number - 1]() if self._pulls and op.number > 0 else None
        if previous is not None:
            previous.gather_ahead()

    def uses_of(self, key: str) -> int:
        """How many calls of units used a group."""
        return self._uses_of[key]

    def buffer(self, key: str, numel: int) -> torch.Tensor:
        """A buffer for the full cotangent of a group: the last one's where it fits, so that memory stays warm."""
        self.finish_reduction()
        use, spare, self._spare = self.uses[key], self._spare, None
        if spare is not None and (spare.numel(), spare.dtype) == (numel, use.reduce):
            return spare
        del spare
        return torch.empty(numel, dtype=use.reduce, device=use.shard.device)

    def reduce(
        self, key: str, full: torch.Tensor, alone: bool, then: Callable[[torch.Tensor], None] | None = None
    ) -> torch.Tensor:
        """This rank's share of a reduced cotangent; deferred, it is there only at the end of the pullback.

        Args:
            full: of `buffer`; it is not the caller's any more.
            alone: whether autograd will not add it to another before that end.
            then: takes it once it is there.
        """
        use = self.uses[key]
        if use.axis.ranks == 1:
            out = full.to(use.grad)
            if then is not None:
                then(out)
            return out
        mean, wait = use.axis.start_reduce_scatter(full, use.tag)
        out = mean if mean.dtype == use.grad else mean.new_empty(mean.shape, dtype=use.grad)

        def finish() -> None:
            wait()
            if out is not mean:
                out.copy_(mean)
            self._spare = full if self._pulls and not self.lean else None
            if then is not None:
                then(out)

        self._reducing = finish
        if not (self._defers and alone):
            self.finish_reduction()
        return out

    @contextlib.contextmanager
    def pullback(self, defers: bool) -> Iterator[None]:
        """Around a whole pullback; outside of one nothing is gathered ahead of a pullback, as its end would be unknown.

        Args:
            defers: whether reductions may end after their unit's pullback has returned.
        """
        self._pulls, self._defers, self._keeps_rooms = True, defers, True
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self._end_of_pullback()
            raise
        finally:
            self._pulls, self._defers, self._keeps_rooms = False, False, False
        self._end_of_pullback()

    def finish_reduction(self) -> None:
        """Waits for the reduction in flight, of which there is one at a time, and whose buffer is then free."""
        if self._reducing is not None:
            reducing, self._reducing = self._reducing, None
            reducing()

    def _end_of_gathers(self) -> None:
        ahead, self._ahead = self._ahead, {}
        for room, wait in ahead.values():
            wait()
            room.busy = False
        self.empty_rooms()

    def _end_of_pullback(self) -> None:
        """Waits for everything in flight: also for what was gathered ahead and not used."""
        self.finish_reduction()
        self._spare = None
        for reference in self._calls:
            op = reference()
            if op is not None:
                op.forget_ahead()
        for room in self._kept.values():
            room.busy = False
        self._kept.clear()
        self._end_of_gathers()
