"""The values that lie on one rank, by the calls that make them, and sums by which ranks see that they have the same."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import NamedTuple

import torch

from fzero.base import pytree
from fzero.components.remote.failure import Failed, Failure
from fzero.components.remote.specs import Dims

Digest = tuple[float, float, float]  # the sum, the norm of the elements, and how near sums must be, relative to it
_WIDTH = 1024  # elements that are summed as a product with one vector


def digest_of(x: torch.Tensor) -> Digest:
    """The sum of all elements of a tensor, each taken times a weight of its own: in another order it is another one.

    Ranks that compute the same have the same bits, but for rounding on processors that differ.
    """
    with torch.no_grad():
        x = pytree.as_reals(x.detach())
        near = {8: 1e-10, 4: 1e-5}.get(x.element_size(), 1e-2) if x.is_floating_point() else 0.0
        if x.dtype not in (torch.float32, torch.float64):
            x = x.to(torch.float32 if x.is_floating_point() else torch.float64)
        flat = x.reshape(-1)
        parts, level = flat, 0
        while level == 0 or parts.numel() > 1:
            parts, level = _products(parts, _weights(level, parts.dtype, parts.device)).double(), level + 1
        return float(parts.sum()), float(torch.linalg.vector_norm(flat)), near


def _products(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The products with some weights of each as many elements, and of those that are left."""
    rows = x.numel() // _WIDTH
    body, rest = x[: rows * _WIDTH].view(rows, _WIDTH), x[rows * _WIDTH :]
    return torch.cat([body @ weights, (rest @ weights[: rest.numel()])[None]])


@functools.lru_cache(64)
def _weights(level: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers of both signs from 0.5 to 1, others at each level."""
    places = torch.arange(1, _WIDTH + 1, dtype=torch.float64, device=device) + 5000 * level
    signs = torch.where((places * 2**0.5).frac() < 0.5, -1.0, 1.0)
    return (signs * (0.5 + (places * (5**0.5 / 2)).frac() / 2)).to(dtype)


def apart(digests: Iterable[tuple[Hashable, Digest]]) -> tuple[Hashable, list[float]] | None:
    """The first of what ranks should have alike that they have not, and its sums; None where all is alike."""
    found: dict[Hashable, list[Digest]] = {}
    for name, digest in digests:
        found.setdefault(name, []).append(digest)
    for name, own in found.items():
        first = own[0]
        if not all(is_close(each, first) for each in own[1:]):
            return name, [each[0] for each in own]
    return None


def is_close(one: Digest, other: Digest) -> bool:
    """Tells whether two tensors of one shape are the same but for rounding, by their digests."""
    wild = [not math.isfinite(total) for total, *_ in (one, other)]
    return all(wild) or (not any(wild) and abs(one[0] - other[0]) <= one[2] * max(one[1], other[1]))


def unlike(component: str, what: object, sums: list[float]) -> str:
    """What is said of what ranks should have alike."""
    return (
        f"component {component!r}: {what} differs between ranks that have the same examples, or that return it without "
        f"a dim of theirs: its elements, taken times weights, add up to {sums}; expected the same on all. Put pieces "
        "together in the function (fz.parallel.gather or sum), and give what all of these ranks have, inputs and "
        "params, to a part that is cut over them by fz.parallel.copy; or split batches over these ranks, too, say in "
        "out_specs= that each of them has its own piece, and in fz.shard_tensor which leaves are cut. Return a whole "
        "number or a bool with a dim of examples, or as a floating tensor."
    )


def device_of(params: object) -> torch.device:
    """Where a rank computes: the device of the params that it was given, which its inputs are brought to."""
    found = (leaf.device for leaf in pytree.leaves(params) if isinstance(leaf, torch.Tensor))
    return next(found, torch.device("cpu"))


class Bringing:
    """Brings operands: to a GPU by a stream of its own, beside what computes. They are there at the end."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def to(self, device: torch.device) -> Iterator[None]:
        if device.type != "cuda":
            yield
            return
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()


def used_here(tree: object) -> None:
    """Has the memory of tensors that another stream has brought kept until this thread's stream has used them."""
    for x in pytree.leaves(tree):
        if isinstance(x, torch.Tensor) and x.is_cuda:
            x.record_stream(torch.cuda.current_stream(x.device))


def made_here(tensors: Iterable[torch.Tensor]) -> dict[torch.device, torch.Event]:
    """For each GPU that tensors lie on an event: from then on they have their values."""
    found: dict[torch.device, torch.Event] = {}
    for x in tensors:
        if x.is_cuda and x.device not in found:
            found[x.device] = torch.cuda.current_stream(x.device).record_event()
    return found


def wait_for(tensor: torch.Tensor, events: dict[torch.device, torch.Event]) -> None:
    """Has this thread's stream wait until a tensor has its values, and its memory kept until the stream has read it."""
    if tensor.is_cuda:
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(events[tensor.device])
        tensor.record_stream(stream)


GRACE = 2.0  # seconds at most beyond the timeout, in which a collective that waits as long says what it waited for
Box = tuple[tuple[int, int], ...]  # of each dim of a tensor, from where to where
Name = tuple[int, int]  # the number of the call that makes a value, and its place among the results: 0 is no tensor


class Piece(NamedTuple):
    """This rank's part of a tensor."""

    # how the tensor is made of the ranks' parts: each "block" is a piece of it, and so is each sum of those of the
    # ranks that have the same, where they are "added"; "mean" is an average by weights
    kind: str
    tensor: torch.Tensor
    dims: Dims = ()  # for each dim the axes that it lies over; of a mean those that its weights depend on
    weight: float = 1.0
    digest: Digest | None = None  # of what other ranks have, too


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
    """The records of one rank."""

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
        """A value, waited for as long as calls end in time."""
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
