"""Line: this rank's place in a pipeline whose places are ranks of a process group, and its messages to the others."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fzero.base import pytree
from fzero.base.context import during, over_means
from fzero.comm import backend
from fzero.comm.axis import Axis
from fzero.comm.backend import Group
from fzero.components.messages import Ident, Lost, Messages
from fzero.components.remote.digests import Digest, digest_of, is_close
from fzero.components.remote.failure import Failed, Failure, error_of, failure_of
from fzero.components.routes import Route, Seat, cut, joined, routes
from fzero.schedules.check import alive
from fzero.schedules.task import Kind, Schedule, Task

ALL: Ident = ("all",)  # what a rank says to all others at the end of a call
Noted = list[tuple[str, list[tuple[torch.Size, Digest]]]]  # what a rank has sent, in words, and of each of its tensors


class Line:
    """One rank of a pipeline over ranks.

    What a rank says at the end of a call comes at once after an error: who waits for anything else of it sees that, and
    ends the call in the same way. So nobody waits for what does not come, and every rank raises.

    Args:
        group: of all ranks of the pipeline.
        seats: of each rank of the group.
        identity: what tells this pipeline from others over the same ranks.

    Attributes:
        count: the number of the call that is running.
        places: how many there are.
        shares: how many of the smallest shares of a batch this rank has.
    """

    def __init__(self, group: Group, schedule: Schedule, seats: Sequence[Seat], identity: str) -> None:
        self.rank, self.seats = backend.rank_in(group), seats
        self.place, self.places = seats[self.rank].place, len(schedule.places)
        self._messages, self._schedule = Messages.of(group), schedule
        self._routes: dict[tuple[int, int], list[Route]] = {}
        self._noted: Noted = []  # of values that go to places with other numbers of copies
        self.count, self._verb, self._identity = 0, "", identity
        self.shares = math.lcm(*[seat.datas for seat in seats]) // seats[self.rank].datas

    def begin_call(self, verb: str) -> None:
        """Every message says which call it is of: ranks that make different ones are told, and take nothing else."""
        self.count, self._verb, self._noted = self.count + 1, verb, []

    @functools.cached_property
    def most_alive(self) -> int:
        """The most pullbacks that the schedule has alive at once at one place."""
        return max(alive(tasks) for tasks in self._schedule.places)

    def _told(self, error: BaseException) -> Failure:
        return failure_of(error, "pipeline", self.rank)

    def _send(self, rank: int, ident: Ident, content: object) -> None:
        self._messages.send(rank, ident, (self._identity, self.count, self._verb, content))

    def _received(self, rank: int, ident: Ident) -> Any:
        ours, (identity, count, verb, content) = self._messages.receive(rank, ident, ALL)
        if (identity, count, verb) != (self._identity, self.count, self._verb):
            raise Lost(
                f"pipeline [{self._identity[:4]}]: rank {self.rank} of its group makes its call {self.count}, of "
                f"{self._verb}, and rank {rank} call {count}, of {verb}, of pipeline [{identity[:4]}]; expected the "
                "same calls in the same order on all ranks. Start the ranks anew: messages of both calls are under way."
            )
        if not ours:
            raise Failed(content[0])
        return content

    def routes(self, source: int, target: int) -> list[Route]:
        """The routes between the places of two stages."""
        pair = self._schedule.place_of(source), self._schedule.place_of(target)
        if pair not in self._routes:
            self._routes[pair] = routes(self.seats, *pair)
        return self._routes[pair]

    def _ident(self, task: Task) -> Ident:
        """What a message is known by: the stage that gives it, the one that takes it, and the microbatch."""
        stages = (task.stage, task.peer) if task.kind is Kind.SEND else (task.peer, task.stage)
        return (*stages, task.microbatch)

    def send(self, task: Task, values: Sequence[object], rows: int | None) -> None:
        """Sends values to every rank that takes some of them.

        Args:
            rows: how many examples this rank has in them, where that is known.
        """
        assert task.peer is not None
        ident, what = self._ident(task), f"what stage {task.stage} gives to stage {task.peer}"
        here, there = (self._seat_of(stage).copies for stage in (task.stage, task.peer))
        if here != there and here > 1:
            own = [(x.shape, digest_of(x)) for x in pytree.leaves(values) if isinstance(x, torch.Tensor)]
            self._noted.append((f"{what} in microbatch {task.microbatch}", own))
        for route in self.routes(task.stage, task.peer):
            if route.source == self.rank:
                self._send(route.target, ident, [cut(value, route, what, rows) for value in values])

    def times(self, stage: int, other: int) -> float:
        """By what cotangents of another place are multiplied here.

        Each rank's are those of its own mean; the gradient is the mean over the ranks of a place.
        """
        return self._seat_of(stage).datas / self._seat_of(other).datas

    def _seat_of(self, stage: int) -> Seat:
        """One of the seats at the place of a stage."""
        return next(seat for seat in self.seats if seat.place == self._schedule.place_of(stage))

    def need_same(self, said: Sequence[tuple[object, int]], stage: int) -> None:
        """Refuses shares of a batch that differ between places: microbatches would count there what they do not here.

        Args:
            said: by each rank, something and its number of examples.
        """
        for rank, (_, examples) in enumerate(said):
            _, other = self.nearest(said, stage, rank)
            if examples != other:
                raise ValueError(
                    f"pipeline: rank {rank} of its group was given {examples} examples, and the rank of the last "
                    f"stage that has its share {other}; expected the same share of the batch in all places."
                )

    def nearest(self, said: Sequence[Any], stage: int, rank: int | None = None) -> Any:
        """What a rank of a stage's place said, of all that ranks did: the one that has this rank's examples."""
        place, own = self._schedule.place_of(stage), self.seats[self.rank if rank is None else rank]
        found = {seat.data: rank for rank, seat in enumerate(self.seats) if seat.place == place and not seat.copy}
        return said[found[own.data % len(found)]]

    def receive(self, task: Task) -> Sequence[object]:
        """The values that another stage gives to this one; raises `Failed` if a rank of it has failed."""
        assert task.peer is not None
        ident, parts = self._ident(task), list[Any]()
        for route in self.routes(task.peer, task.stage):
            if route.target == self.rank:
                parts.append(self._received(route.source, ident))
        what = f"what stage {task.peer} gives to stage {task.stage}"
        return tuple(joined(own, what) for own in zip(*parts, strict=True))

    def exchange(self, own: object, error: BaseException | None) -> list[Any]:
        """What every rank says, in rank order; raises on all of them if one has failed.

        Args:
            own: a small tree.
        """
        failed = self._told(error) if error is not None else None
        ranks = len(self.seats)
        others = [rank for rank in range(ranks) if rank != self.rank]
        for rank in others:
            with contextlib.suppress(Lost):  # which shows below
                try:
                    self._send(rank, ALL, (failed, own, self._noted))
                except TypeError as caught:  # of what cannot be sent
                    error = error or caught
                    failed, own = self._told(error), None
                    self._send(rank, ALL, (failed, None, self._noted))
        if isinstance(error, Lost):  # all are told, and some may say nothing more
            raise error
        said = {self.rank: (failed, own, self._noted)}
        try:
            said |= {rank: self._received(rank, ALL) for rank in others}
        except Lost as lost:
            if error is None or isinstance(error, Failed):
                raise
            error.add_note(f"The other ranks could not be told: {lost}")
            raise error from lost
        self._messages.clear()
        if error is not None and not isinstance(error, Failed):
            raise error
        first = next((said[rank][0] for rank in range(ranks) if said[rank][0] is not None), None)
        if first is not None:
            where = f"rank {first.rank} at place {self.seats[first.rank].place}"
            raise error_of(first._replace(message=f"pipeline: {where} failed: {first.kind}: {first.message}"))
        need_alike(self.seats, [said[rank][2] for rank in range(ranks)])
        return [said[rank][1] for rank in range(ranks)]


def need_alike(seats: Sequence[Seat], noted: Sequence[Noted]) -> None:
    """Refuses what differs between ranks of a place that have the same examples, of what each rank has noted.

    Where it goes to a place with fewer of them, one's alone is taken.
    """
    for rank, seat in enumerate(seats):
        first = next(i for i, other in enumerate(seats) if (other.place, other.data) == (seat.place, seat.data))
        for (what, own), (_, other) in zip(noted[rank], noted[first], strict=True):
            like = [a == b and is_close(x, y) for (a, x), (b, y) in zip(own, other, strict=False)]
            if len(own) != len(other) or not all(like):
                raise ValueError(
                    f"pipeline: {what} differs between ranks {first} and {rank} of its group, which have the same "
                    "examples, and it goes to a place with another number of such ranks, where one's alone would be "
                    "taken; expected the same on all. Put the ranks' slices together in the stage (fz.parallel.gather "
                    "or sum; in front of what each computes with its own slice, fz.parallel.copy), or give both places "
                    "as many ranks of the axis that leaves are cut over."
                )


@contextlib.contextmanager
def refusing_cut_sequences(line: Line | None, stage: int) -> Iterator[None]:
    """Around a stage's function: where places are of other numbers of ranks, values go between them by examples.

    A function that also goes over the axis along dim 0 changes between sequences and examples by itself.

    Raises:
        ValueError: it cuts sequences over ranks whose parts other places would take for examples.
    """
    counts = sorted({seat.datas for seat in line.seats}) if line is not None else []
    if len(counts) < 2:
        yield
        return
    cut: dict[tuple[int, ...], tuple[str, str]] = {}
    by_examples: set[tuple[int, ...]] = set()

    def noted(ax: Axis, who: str, dim: int) -> None:
        if dim:
            cut.setdefault(ax.members, (who, ax.name))
        else:
            by_examples.add(ax.members)

    with during(over_means, noted):
        yield
    for members, (who, name) in cut.items():
        if members not in by_examples:
            raise ValueError(
                f"pipeline: stage {stage} calls fz.parallel.{who} over axis {name!r}, ranks {list(members)}, each of "
                "which has a part of the same sequences there, and its step takes means over them. The places have "
                f"{counts} ranks that means are over: values between them are cut by examples, the rows of dim 0; "
                "expected examples of each rank's own at the ends of the function. Say x = fz.parallel.all_to_all(x, "
                "ax, split=1, concat=0) at its beginning and x = fz.parallel.all_to_all(x, ax, split=0, concat=1) at "
                "its end, or give the places as many ranks."
            )


def shapes_of(tree: object) -> object:
    """A tree without its tensors' memory, but for 0-d ones, which are small: what the other places are told."""
    small = lambda x: torch.empty_like(x, device="meta") if isinstance(x, torch.Tensor) and x.ndim else x
    return pytree.map_leaves(small, tree)
