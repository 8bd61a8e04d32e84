"""One rank: it takes calls in order, brings their operands while earlier ones compute, and keeps the results."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fzero.base import pytree
from fzero.components.remote import verbs
from fzero.components.remote.failure import Failed, Failure, failure_of, first_of
from fzero.components.remote.layout import Layout, share
from fzero.components.remote.link import Arguments, Message
from fzero.components.remote.pull import Puller, Source
from fzero.components.remote.values import Meta, Name, Piece, Record, Values, version_of
from fzero.components.remote.verbs import Operands, Part, Pulled
from fzero.components.remote.wire import unpacked

AHEAD = 4  # calls whose operands are brought while an earlier one computes


class _Call(NamedTuple):
    number: int
    verb: str
    arguments: Arguments
    key: int | None  # of the trees that it returns
    record: Record


class Host:
    """A rank of a component, as its link and other ranks see it.

    Args:
        identity: of the component.
        report: sends a message to the controlling process.
        patience: seconds that one call may take.
        around: what a call runs in.
    """

    def __init__(
        self,
        component: str,
        identity: str,
        rank: int,
        report: Callable[[tuple[object, ...]], object],
        patience: float,
        around: Callable[[], Any],
    ) -> None:
        self.component, self.identity, self.rank = component, identity, rank
        self.report, self.patience, self.around = report, patience, around
        self.values = Values(component, rank, patience)
        self.puller = Puller(rank)
        self.peers: Sequence[Source] = ()
        self._arrived: dict[int, Failure | None] = {}
        self._arrival = threading.Condition()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._ready: queue.Queue[tuple[_Call, Operands | Failure] | None] = queue.Queue(AHEAD)
        self._trees: dict[int, object] = {}
        self._over, self._ended = False, threading.Event()
        threading.Thread(target=self._fetch, name=f"fzero-fetch-{rank}", daemon=True).start()

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
                self.has_copies = any(len(same) > 1 or len(same[0]) > 1 for same in table.sources)
                self.peers = [source for source in table.every if source is not self]
        else:
            assert kind == "close", kind
            self.close(Failure("RuntimeError", f"component {self.component!r} was closed", self.component, self.rank))

    def close(self, failure: Failure) -> None:
        """Ends it: what waits here fails, and `run` returns."""
        self._over = True
        self.values.close(failure)
        with self._arrival:
            self._arrival.notify_all()
        self._calls.put(None)
        with contextlib.suppress(queue.Full):
            self._ready.put_nowait(None)  # `run` may wait for operands that wait for others

    # ---- what others ask, from their threads

    def metas(self, names: Sequence[Name], alive: Callable[[], None] = lambda: None) -> list[Meta | Failure]:
        return [self.values.meta(name, alive) for name in names]

    def rows(self, wanted: Sequence[tuple[Name, int, int]]) -> list[torch.Tensor]:
        return [self.values.rows(name, start, stop) for name, start, stop in wanted]

    def trees(self, call: int, alive: Callable[[], None] = lambda: None) -> object:
        """What a call returned, without the tensors."""
        try:
            return self.values.trees(call, alive)
        except Failed as failed:
            return failed.failure

    def arrived(self, call: int, alive: Callable[[], None] = lambda: None) -> Failure | None:
        """Waits until a call's operands are here; what is told of why they are not."""
        with self._arrival:
            while not self._arrival.wait_for(lambda: call in self._arrived or self._over, self.values.beat):
                alive()
            if call not in self._arrived:
                return Failure("ComponentDied", "was closed", self.component, self.rank, lost=self.identity)
            return self._arrived[call]

    # ---- operands

    def _fetch(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                with torch.no_grad():
                    operands = self._operands(call)
            except Exception as error:
                operands = failure_of(error, self.component, self.rank, self.identity)
            if call.arguments.get("refers"):
                operands = self._agreed(call.number, operands)
                self.report(("fetched", call.number))
            self._pass((call, operands))
            del operands, call
        self._pass(None)

    def _pass(self, item: tuple[_Call, Operands | Failure] | None) -> None:
        """Hands a call over to be run, unless nothing is run any more."""
        while not self._ended.is_set():
            with contextlib.suppress(queue.Full):
                return self._ready.put(item, timeout=0.5)

    def _agreed(self, number: int, operands: Operands | Failure) -> Operands | Failure:
        """The operands, where all ranks have theirs: otherwise none runs the call, or some would wait for others."""
        if not self.peers:
            return operands
        own = operands if isinstance(operands, Failure) else None
        with self._arrival:
            self._arrived[number] = own
            self._arrived.pop(number - 1000, None)
            self._arrival.notify_all()
        try:
            failures = [peer.arrived(number) for peer in self.peers]
        except Failed as failed:
            failures = [failed.failure]
        found = [failure for failure in (own, *failures) if failure is not None]
        return first_of(found) if found else operands

    def _operands(self, call: _Call) -> Operands:
        given = call.arguments
        objects = {what: self.values.get(name) for what, name in given.get("objects", {}).items()}
        part = self.part
        out = Operands(objects, given.get("options", {}))
        wanted: list[tuple[Any, Any]] = []
        if "inputs" in given:
            skeleton, leaves = given["inputs"]
            totals: dict[int, int] = {place: leaf[2] for place, leaf in enumerate(leaves) if leaf[0] == "slice"}

            def rows_of(place: int) -> Callable[[Layout], tuple[int, int]]:
                def rows(layout: Layout) -> tuple[int, int]:
                    totals[place] = layout.shape[0]
                    return share(layout.shape[0], part.place.data_rank, part.place.data_size)

                return rows

            wanted = [(leaf, rows_of(place)) for place, leaf in enumerate(leaves)]
            tensors = self.puller.pulled(wanted)
            out.inputs = unpacked(skeleton, tensors)
            out.skeleton, out.split = skeleton, [place in totals for place in range(len(leaves))]
            if len(set(totals.values())) > 1:
                raise ValueError(
                    f"{call.verb}: the inputs are split along dim 0 over data ranks, and their tensors have "
                    f"{sorted(totals.items())} rows (number of the tensor, rows); expected the same dim 0 for all. "
                    "What belongs to no example must be 0-d, or built into the function."
                )
            if totals:
                out.total = next(iter(totals.values()))
                start, stop = share(out.total, part.place.data_rank, part.place.data_size)
                out.examples = stop - start
        if given.get("cotangent") is not None:
            skeleton, leaves = given["cotangent"]
            out.cotangent = self._cotangent(objects["pullback"], skeleton, leaves)
        if "norm" in given:
            (norm,) = self.puller.pulled([(given["norm"], lambda layout: None)])
            out.options = {**out.options, "grad_norm": norm}
        return out

    def _cotangent(self, pulled: Any, skeleton: Any, leaves: Sequence[Any]) -> Any:
        """This rank's part of a cotangent: the rows of its own outputs, and its share of a mean."""
        assert isinstance(pulled, Pulled)
        tree = unpacked(skeleton, [_Leaf(leaf) for leaf in leaves])
        flat, spec = pytree.flatten(tree)
        if spec != pulled.spec:
            raise ValueError(
                f"cotangent: got the structure {spec}, expected that of the outputs, {pulled.spec}. Give one cotangent "
                "per output, in the same containers; None counts as zero."
            )
        places = [place for place, leaf in enumerate(flat) if isinstance(leaf, _Leaf)]
        layouts = self._layouts_of(pulled, [place for place in places if pulled.names[place] is not None])
        wanted = []
        for place in places:
            expected = layouts.get(place)
            wanted.append((_own_rows(flat[place].leaf, expected, self.part), _rows_of(expected, self.part, place)))
        for place, tensor in zip(places, self.puller.pulled(wanted), strict=True):
            factor = pulled.factors[place]
            flat[place] = tensor if tensor is None or factor == 1.0 else tensor * factor
        return pytree.unflatten(spec, flat)

    def _layouts_of(self, pulled: Pulled, places: Sequence[int]) -> dict[int, Layout]:
        """The layouts of outputs over all data ranks, by their places."""
        missing = [place for place in places if place not in pulled.layouts]
        if missing:
            names = [name for place in missing if (name := pulled.names[place]) is not None]
            pulled.layouts.update(zip(missing, self.puller.layouts(self.identity, names), strict=True))
        return {place: pulled.layouts[place] for place in places}

    # ---- calls

    part: Part
    has_copies = False  # whether other ranks have the same examples

    def has_built(self, part: Part) -> None:
        """Takes what calls work with, before the first of them."""
        self.part = part

    def run(self) -> None:
        """Runs calls until it is closed, on the thread that has the process group."""
        try:
            while (item := self._ready.get()) is not None and not self._over:
                self._run_one(*item)
                del item
        finally:
            self._ended.set()

    def _run_one(self, call: _Call, operands: Operands | Failure) -> None:
        self.values.running(call.number, call.verb)
        values: dict[int, object] = {}
        failure = operands if isinstance(operands, Failure) else None
        if isinstance(operands, Operands):
            try:
                self._need_unwritten(call)
                with self.around():
                    results = verbs.RUN[call.verb](self.part, operands, call.number)
                values, trees = results.values, results.trees
                call.record.sums = self._sums(call.key, values)
                self._check(call.key, trees)
                call.record.trees = trees
                del results
            except Exception as error:
                failure = failure_of(error, self.component, self.rank, self.identity)
                del error
        self.values.running(None)
        call.record.finish({} if failure else values, failure)
        if failure is not None:
            self.report(("failed", call.number, tuple(failure)))

    def _need_unwritten(self, call: _Call) -> None:
        """Refuses tensors of the caller that came by reference and were written to since."""
        for leaf in call.arguments.get("inputs", ((), ()))[1]:
            if leaf[0] in ("slice", "tensor") and len(leaf) > 3 and version_of(leaf[1]) != leaf[3]:
                raise RuntimeError(
                    f"{call.verb}: an input of shape {tuple(leaf[1].shape)} was written to in place after the call, "
                    "which had not run yet; expected it to stay as it was, as ranks on threads share it. Pass "
                    "x.clone(), or wait for the call (fz.fetch) before you write."
                )

    def _sums(self, key: int | None, values: dict[int, object]) -> tuple[float, ...]:
        """Sums of what other ranks should have too, for a comparison at the first call of a kind."""
        if key is None or key in self._trees or not self.has_copies:
            return ()
        tensors = [x.tensor for x in values.values() if isinstance(x, Piece) and x.kind in ("rows", "same", "alike")]
        return tuple([float(x.detach().to(torch.float64).abs().sum()) for x in tensors])

    def _check(self, key: int | None, trees: object) -> None:
        """Refuses other trees than those of earlier calls, which the caller has taken for granted."""
        if key is not None and self._trees.setdefault(key, trees) != trees:
            raise ValueError(
                f"component {self.component!r}: the function returned another structure than in an earlier call with "
                f"inputs of the same structure and shapes: got {trees}, expected {self._trees[key]}. The caller went "
                "on with the earlier one. Return the same containers every time; numbers that change, as tensors."
            )


class _Leaf:
    """A cotangent's leaf that is not here yet."""

    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf


def _rows_of(expected: Layout | None, part: Part, place: int) -> Callable[[Layout], tuple[int, int] | None]:
    """Which rows of a cotangent are this rank's."""

    def rows(layout: Layout) -> tuple[int, int] | None:
        if expected is None or expected.kind != "rows":
            return None
        _need_shape(layout.shape, expected, place)
        start = sum(expected.lengths[: part.place.data_rank])
        return start, start + expected.lengths[part.place.data_rank]

    return rows


def _own_rows(leaf: Any, expected: Layout | None, part: Part) -> Any:
    """A leaf that is a whole tensor of the caller's, cut to this rank's rows."""
    if leaf[0] == "sum":
        return "sum", [_own_rows(each, expected, part) for each in leaf[1]]
    if leaf[0] != "tensor" or expected is None or expected.kind != "rows":
        return leaf
    _need_shape(tuple(leaf[1].shape), expected, 0)
    start = sum(expected.lengths[: part.place.data_rank])
    return "tensor", leaf[1][start : start + expected.lengths[part.place.data_rank]]


def _need_shape(got: Sequence[int], expected: Layout, place: int) -> None:
    if tuple(got) != expected.shape:
        raise ValueError(
            f"cotangent of output {place}: got shape {tuple(got)}, expected {expected.shape}, that of the output over "
            "all data ranks. Give the cotangent of this forward's own output."
        )
