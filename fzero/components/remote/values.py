"""The values that lie on one rank, by the calls that make them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from fzero.components.remote.digests import Digest
from fzero.components.remote.failure import Failed, Failure
from fzero.components.remote.specs import Dims
from fzero.components.remote.streams import made_here, wait_for

GRACE = 2.0  # seconds at most beyond the timeout, in which a collective that waits as long says what it waited for
Box = tuple[tuple[int, int], ...]  # of each dim of a tensor, from where to where
Name = tuple[int, int]  # the number of the call that makes a value, and its place among the results: 0 is no tensor


class Piece(NamedTuple):
    """This rank's part of a tensor.

    Attributes:
        kind: how the tensor is made of the ranks' parts: each "block" is a piece of it, and so is each sum of those of
            the ranks that have the same, where they are "added"; "mean" is an average by weights.
        dims: for each dim the axes that it lies over; of a mean those that its weights depend on.
        digest: of what other ranks have, too.
    """

    kind: str
    tensor: torch.Tensor
    dims: Dims = ()
    weight: float = 1.0
    digest: Digest | None = None


def whole(tensor: torch.Tensor) -> Piece:
    """The piece of what every rank has."""
    return Piece("block", tensor, ((),) * tensor.ndim)


def cut_to(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A box of a tensor: rows are shared with it, and anything else is new memory."""
    out = tensor[tuple([slice(start, stop) for start, stop in box])]
    rows = all(n == m for n, m in zip(out.shape[1:], tensor.shape[1:], strict=True))
    return out if rows else out.contiguous()


class Meta(NamedTuple):
    """What is told of a piece ahead of its values."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    dims: Dims
    weight: float
    digest: Digest | None = None


def _meta(piece: Piece) -> Meta:
    tensor = piece.tensor
    about = tuple(tensor.shape), tensor.dtype, str(tensor.device)
    return Meta(piece.kind, *about, piece.dims, piece.weight, piece.digest)


class Record:
    """One call: what it makes, and whether it has."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.failure: Failure | None = None
        self.trees: object = None  # that it returned, without the tensors
        self.ready: dict[torch.device, torch.Event] = {}  # by GPU, once its values will be there
        self.metas: dict[int, Meta] = {}  # of its tensors, also once these are freed: cotangents are cut by them
        self._values: dict[int, object] = {}
        self._freed: set[int] = set()
        self._lock = threading.Lock()

    def finish(self, values: dict[int, object], failure: Failure | None = None) -> None:
        self.ready = made_here([value.tensor for value in values.values() if isinstance(value, Piece)])
        with self._lock:
            self.failure = failure
            self.metas = {place: _meta(value) for place, value in values.items() if isinstance(value, Piece)}
            self._values = {place: value for place, value in values.items() if place not in self._freed}
        self.done.set()

    def free(self, place: int) -> object:
        with self._lock:
            self._freed.add(place)
            return self._values.pop(place, None)

    def value(self, place: int) -> object:
        if self.failure is not None:
            raise Failed(self.failure)
        return self._values[place]


class Values:
    """The records of one rank.

    Args:
        patience: seconds that one call may take.
    """

    def __init__(self, component: str, rank: int, patience: float) -> None:
        self.component, self.rank, self.patience = component, rank, patience
        self.beat = min(1.0, patience / 4)  # seconds between two signs of life to who waits
        self._records: dict[int, Record] = {}
        self._arrived = threading.Condition()
        self._running: tuple[int, str, float] | None = None
        self._over: Failure | None = None
        self._begun: dict[int, int] = {}  # collectives, by the call, of the last ones that were run
        self._last = -1  # the call that has arrived last: they come in order

    def begin(self, call: int) -> Record:
        """Notes a call that has arrived: others may wait for its values from now on."""
        record = Record()
        with self._arrived:
            self._records[call], self._last = record, call
            self._arrived.notify_all()
        return record

    def running(self, call: int | None, verb: str = "") -> None:
        """Notes which call runs now, since when."""
        self._running = None if call is None else (call, verb, time.monotonic())

    def ran(self, call: int, begun: int) -> None:
        """Notes a call that was run, also of what may be forgotten already, and how many collectives it began."""
        with self._arrived:
            self._begun[call] = begun
            self._begun.pop(call - 10_000, None)
            self._arrived.notify_all()

    def ended(self, call: int, alive: Callable[[], None] = lambda: None) -> int:
        """Waits until a call was run, as long as calls end in time: how many collectives it began here."""
        while call not in self._begun:
            if self._over is not None:
                raise Failed(self._over)
            self._need_time()
            with self._arrived:
                news = self._arrived.wait_for(lambda: call in self._begun or self._over, self.beat)
            if not news:
                alive()
        return self._begun[call]

    def close(self, failure: Failure) -> None:
        """Nothing more will be made: whoever waits is told why."""
        self._over = failure
        with self._arrived:
            records = [*self._records.values()]
            self._arrived.notify_all()
        for record in records:
            if not record.done.is_set():
                record.finish({}, failure)

    def clear(self) -> None:
        """Forgets all values: nothing runs any more."""
        with self._arrived:
            self._records.clear()

    def free(self, call: int, place: int) -> None:
        """Forgets a value; with place -1 all of a call."""
        with self._arrived:
            record = self._records.get(call) if place >= 0 else self._records.pop(call, None)
        if record is not None and place >= 0:
            record.free(place)

    def missing(self, call: int) -> Failure | None:
        """What is told of a call that has not arrived in time; None of one that has."""
        return None if call <= self._last else self._late(f"call {call} has not arrived")

    def record(self, call: int) -> Record:
        """The record of a call that may not have arrived yet."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: call <= self._last or self._over, self.patience):
                raise Failed(self._late(f"call {call} has not arrived"))
            if self._over is not None and call not in self._records:
                raise Failed(self._over)
            assert call in self._records, f"call {call} was asked for, and nobody held what it made"
            return self._records[call]

    def get(self, name: Name, alive: Callable[[], None] = lambda: None) -> object:
        """A value, waited for as long as calls end in time.

        Args:
            alive: called now and then while it waits.
        """
        return self._ended(name[0], alive).value(name[1])

    def trees(self, call: int, alive: Callable[[], None]) -> object:
        """The trees that a call returned and the places of its tensors, waited for likewise."""
        record = self._ended(call, alive)
        if record.failure is not None:
            raise Failed(record.failure)
        return record.trees, tuple(record.metas)

    def _ended(self, call: int, alive: Callable[[], None]) -> Record:
        record = self.record(call)
        while not record.done.is_set():
            self._need_time()
            if not record.done.wait(self.beat):
                alive()
        return record

    def _need_time(self) -> None:
        """Refuses where the call that runs now takes too long."""
        running, late = self._running, self.patience + min(GRACE, self.patience / 2)
        if running is not None and time.monotonic() - running[2] > late:
            raise Failed(self._late(f"call {running[0]} ({running[1]}) has not ended"))

    def _late(self, what: str) -> Failure:
        message = (
            f"{what} after {self.patience:g} seconds, the timeout of component {self.component!r}. Give fz.remote a "
            "longer timeout= if its calls take that long."
        )
        return Failure("TimeoutError", message, self.component, self.rank)

    def meta(self, name: Name, alive: Callable[[], None] = lambda: None) -> Meta | Failure:
        try:
            record = self._ended(name[0], alive)
        except Failed as failed:
            return failed.failure
        return record.failure or record.metas[name[1]]

    def block(self, name: Name, box: Box | None) -> torch.Tensor:
        """A box of a piece; all of it where that is None."""
        record = self._ended(name[0], lambda: None)
        piece = record.value(name[1])
        assert isinstance(piece, Piece)
        wait_for(piece.tensor, record.ready)
        return piece.tensor if box is None else cut_to(piece.tensor, box)
