"""One rank: it takes calls in order, brings their operands while earlier ones compute, and keeps the results."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fzero.base import pytree
from fzero.comm.divergence import checked_collectives, recorded_collectives
from fzero.components.remote import verbs
from fzero.components.remote.building import built_by
from fzero.components.remote.failure import Failed, Failure, failure_of, first_of, left_waiting
from fzero.components.remote.link import NOTICED, Arguments, Kept, Message, Place, Settings
from fzero.components.remote.operands import bring_inputs, brought_cotangent
from fzero.components.remote.part import Operands, Part, Pulled
from fzero.components.remote.pull import Puller
from fzero.components.remote.values import Box, Bringing, Meta, Name, Record, Values, device_of, digest_of, used_here

AHEAD = 4  # calls whose operands are brought while an earlier one computes


class _Call(NamedTuple):
    number: int
    verb: str
    arguments: Arguments
    key: int | None  # of the trees that it returns
    record: Record


class Order:
    """What ranks on threads have begun: whoever is to end does the same as the others, or these would wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = -1
        self._last: int | None = None

    def close(self) -> None:
        """No rank begins a call that none has begun yet."""
        with self._lock:
            self._last = self._begun if self._last is None else self._last

    def begins(self, call: int) -> bool:
        """Notes that a rank is about to run a call; False where it must not any more."""
        with self._lock:
            if self._last is not None and call > self._last:
                return False
            self._begun = max(self._begun, call)
            return True

    def is_over(self, call: int) -> bool:
        """Tells whether a call will not be run any more."""
        with self._lock:
            return self._last is not None and call > self._last


class Host:
    """A rank of a component, as its link and other ranks see it."""

    def __init__(
        self, settings: Settings, rank: int, report: Callable[[Message], object], order: Order | None = None
    ) -> None:
        self.settings, self.component, self.identity = settings, settings.component, settings.identity
        self.rank, self._send, self.patience = rank, report, settings.timeout
        self.values = Values(self.component, rank, self.patience)
        self.puller, self._bringing = Puller(rank), Bringing()
        self.peers: Sequence[Any] = ()
        self._arrived: dict[int, Failure | None] = {}
        self._arrival = threading.Condition()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._ready: queue.Queue[tuple[_Call, Operands | Failure] | None] = queue.Queue(AHEAD)
        self._trees = Kept[int, object]()
        self._over, self._ended, self._order = False, threading.Event(), order or Order()
        self.fetching = threading.Thread(target=self._fetch, name=f"fzero-fetch-{rank}", daemon=True)
        self.fetching.start()

    def report(self, message: tuple[object, ...]) -> None:
        """Tells the controlling process something, unless that has gone or closed the component meanwhile."""
        with contextlib.suppress(OSError):
            self._send(message)

    # ---- what arrives

    def take(self, message: Message) -> None:
        """One message of the controlling process."""
        kind = message[0]
        if kind == "call":
            number, verb, arguments, key = message[1:]
            self._calls.put(_Call(number, verb, arguments, key, self.values.begin(number)))
        elif kind == "free":
            for call, place in message[1]:
                self.values.free(call, place)
        elif kind == "table":
            _, identity, table = message
            self.puller.tables[identity] = table
            if identity == self.identity:
                self.peers = [source for source in table.sources if source is not self]
        elif kind == "gone":
            self.puller.forget(message[1])
        else:
            assert kind == "close", kind
            self.close(Failure("RuntimeError", f"component {self.component!r} was closed", self.component, self.rank))

    def close(self, failure: Failure) -> None:
        """Ends it: what waits here fails, and `run` returns."""
        self._order.close()
        self._over = True
        self.values.close(failure)
        with self._arrival:
            self._arrival.notify_all()
        self._calls.put(None)
        with contextlib.suppress(queue.Full):
            self._ready.put_nowait(None)  # `run` may wait for operands that wait for others

    def join(self, timeout: float) -> None:
        """Waits until no operands are brought any more: a thread that computes as the interpreter ends aborts it.

        One that waits for values of another component is left.
        """
        if self.fetching is not threading.current_thread():
            self.fetching.join(min(timeout, 0.2))

    # ---- what others ask, from their threads

    def left(self) -> None:
        """A reader in this process will ask nothing more."""

    def metas(self, names: Sequence[Name], alive: Callable[[], None] = lambda: None) -> list[Meta | Failure]:
        return [self.values.meta(name, alive) for name in names]

    def blocks(self, wanted: Sequence[tuple[Name, Box | None]], device: object = None) -> list[torch.Tensor]:
        return [self.values.block(name, box) for name, box in wanted]

    def trees(self, call: int, alive: Callable[[], None] = lambda: None) -> object:
        """What a call returned, without the tensors."""
        try:
            return self.values.trees(call, alive)
        except Failed as failed:
            return failed.failure

    def arrived(self, call: int, alive: Callable[[], None] = lambda: None) -> Failure | None:
        """Waits until a call's operands are here: what is told of why they are not, or None."""
        begun = time.monotonic()
        with self._arrival:
            while not self._arrival.wait_for(lambda: call in self._arrived or self._over, self.values.beat):
                alive()
                if time.monotonic() - begun > self.patience and (late := self.values.missing(call)) is not None:
                    return late
            if call not in self._arrived:
                return Failure("ComponentDied", "was closed", self.component, self.rank, lost=self.identity)
            return self._arrived[call]

    def ended(self, call: int, alive: Callable[[], None] = lambda: None) -> int:
        return self.values.ended(call, alive)

    # ---- operands

    def _fetch(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                with torch.no_grad(), self._bringing.to(self.puller.device):
                    operands = self._operands(call)
            except Exception as error:
                operands = failure_of(error, self.component, self.rank, self.identity)
            if call.arguments.get("refers"):
                operands = self._agreed(call, operands)
                self.report(("fetched", call.number))
            self._pass((call, operands))
            del operands, call
        self._pass(None)

    def _pass(self, item: tuple[_Call, Operands | Failure] | None) -> None:
        """Hands a call over to be run, unless nothing is run any more."""
        while not self._ended.is_set():
            with contextlib.suppress(queue.Full):
                return self._ready.put(item, timeout=0.5)

    def _agreed(self, call: _Call, operands: Operands | Failure) -> Operands | Failure:
        """The operands, where all ranks have theirs: otherwise none runs the call, or some would wait for others."""
        if not self.peers:
            return operands
        own = operands if isinstance(operands, Failure) else None
        with self._arrival:
            self._arrived[call.number] = own
            self._arrived.pop(call.number - 1000, None)
            self._arrival.notify_all()
        try:
            told = [own, *[peer.arrived(call.number) for peer in self.peers]]
        except Failed as failed:
            told = [own, failed.failure]
        failures = [each for each in told if each is not None]
        return first_of(failures) if failures else operands

    def _operands(self, call: _Call) -> Operands:
        given = call.arguments
        objects = {what: self.values.get(name) for what, name in given.get("objects", {}).items()}
        out = Operands(call.number, objects, given.get("options", {}))
        if "inputs" in given:
            bring_inputs(out, given["inputs"], self.place, self.puller, call.verb)
        if given.get("cotangent") is not None:
            skeleton, leaves = given["cotangent"]
            pulled, where = objects["pullback"], (self.place, self.puller, self.identity)
            assert isinstance(pulled, Pulled)
            out.cotangent = brought_cotangent(pulled, skeleton, leaves, *where)
        return out

    # ---- calls

    part: Part
    place: Place

    def builds(self, build: Callable[[], Callable[[int], object]]) -> bool:
        """Makes what calls work with, by the user's function, and reports it, or why it cannot be made."""
        try:
            part = built_by(build(), self.rank, self.settings)
        except Exception as error:
            self.report(("broken", failure_of(error, self.component, self.rank)))
            return False
        self.part, self.place, self.puller.device = part, part.place, device_of(part.params)
        tensors = [x for x in pytree.leaves(part.params) if isinstance(x, torch.Tensor) and not x.is_meta]
        self.report(("ready", part.place, list(map(digest_of, tensors)) if part.place.means < part.ranks else []))
        return True

    def run(self) -> None:
        """Runs calls until it is closed, on the thread that has the process group."""
        following = 0
        try:
            while not self._order.is_over(following):
                item = self._ready.get()
                if item is None:  # closed: a call that another rank has begun is still to come, if it was sent here
                    if self.values.missing(following):
                        break
                    continue
                if not self._order.begins(item[0].number):
                    break
                following = item[0].number + 1
                if not self._run_one(*item):
                    break
                del item
        finally:
            self._ended.set()
            ready, self._ready = self._ready, queue.Queue()  # nothing may lie there that holds the process group
            with contextlib.suppress(queue.Empty):
                while True:  # who brings operands may wait for room
                    ready.get_nowait()

    def let_go(self) -> None:
        """Forgets all that lies here, once it is closed: what holds the process group holds up the other ranks."""
        self.values.clear()
        self._ready, self._arrived = queue.Queue(), {}
        self.__dict__.pop("part", None)

    def _run_one(self, call: _Call, operands: Operands | Failure) -> bool:
        """Runs a call; False where no other may follow, as the component ends."""
        self.values.running(call.number, call.verb)
        values: dict[int, object] = {}
        failure, begun = operands if isinstance(operands, Failure) else None, time.monotonic()
        collectives: Sequence[object] = ()
        if isinstance(operands, Operands):
            try:
                used_here((operands.inputs, operands.cotangent, operands.options))
                checked = checked_collectives(self.settings.checked, counted=True)
                with checked, recorded_collectives() as collectives:
                    results = verbs.RUN[call.verb](self.part, operands)
                values, trees = results.values, results.trees
                self._check(call.key, trees)
                call.record.trees = trees
                del results
            except Exception as error:
                failure = failure_of(error, self.component, self.rank, self.identity)
                del error
        self.values.running(None)
        self.part.ran(call.verb, call.arguments.get("options", {}), begun)
        call.record.finish({} if failure else values, failure)
        # of those that were checked first none has begun before all ranks came
        self.values.ran(call.number, 0 if self.settings.checked else len(collectives))
        if failure is None:
            return True
        self.report(("failed", call.number, failure))
        return all(self._ended_alike(call.number, failure, peer.ended) for peer in self.peers)

    def _ended_alike(self, call: int, failure: Failure, ended: Callable[[int], int]) -> bool:
        """Waits for another rank's end of a call that failed here: what it still communicates there, or has sent, would
        meet what this one does in the next. False once the component ends."""
        try:
            if ended(call) == self.values.ended(call):
                return True
            other = "and another rank began other collectives in it"
        except Failed as failed:
            other = f"which another rank has not ended ({failed.failure.message})"
            with self._arrival:  # a death is noticed in a moment
                self._arrival.wait_for(lambda: self._over, 5 * NOTICED if failed.failure.lost else 0.0)
        self.report(("died", *left_waiting(failure, other)))
        return False

    def _check(self, key: int | None, trees: object) -> None:
        """Refuses other trees than those of earlier calls, which the caller has taken for granted."""
        known = None if key is None else self._trees.get(key)
        if key is not None and known is None:
            self._trees[key] = trees
        elif key is not None and known != trees:
            raise ValueError(
                f"component {self.component!r}: the function returned another structure than in an earlier call with "
                f"inputs of the same structure and shapes: got {trees}, expected {known}. The caller went "
                "on with the earlier one. Return the same containers every time; numbers that change, as tensors."
            )
