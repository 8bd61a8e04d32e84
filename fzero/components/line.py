"""Line: this rank's place in a pipeline whose places are ranks of a process group, and its messages to the others."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fzero.base import pytree
from fzero.comm import backend
from fzero.comm.backend import Group
from fzero.components.messages import Lost, MessageId, Messages
from fzero.components.packing import Packed
from fzero.components.remote.failure import Failed, Failure, error_of, failure_of
from fzero.schedules.check import alive
from fzero.schedules.task import Schedule, Task

ALL = MessageId("all", 0, 0)  # what a rank says to all others at the end of a call
AHEAD = 4  # messages that are received before their turn


class Seat(NamedTuple):
    """Where a rank is in a pipeline.

    Attributes:
        place: whose tasks it does.
        data, datas: its number among the place's ranks that have different examples, and their count.
        copy, copies: its number among those that have the same, as the ranks of a tensor axis do, and their count.
    """

    place: int
    data: int
    datas: int
    copy: int
    copies: int


class Line:
    """One rank of a pipeline over ranks.

    After an error a rank goes on with its messages, in which it says so, until all have been sent and received: so
    nobody waits for what does not come, and every rank raises.

    Args:
        group: of all ranks of the pipeline.
        seats: of each rank of the group.
        identity: what tells this pipeline from others over the same ranks.

    Attributes:
        count: the number of the call that is running.
        places: how many there are.
    """

    def __init__(self, group: Group, schedule: Schedule, seats: Sequence[Seat], identity: str) -> None:
        self.rank, self.seats = backend.rank_in(group), seats
        self.place, self.places = seats[self.rank].place, len(schedule.places)
        self._messages, self._schedule = Messages(group), schedule
        self._gone: set[tuple[int, MessageId]] = set()  # what was sent in this call
        self.count, self._verb, self._identity = 0, "", identity

    def begin_call(self, verb: str) -> None:
        """Every message says which call it is of: ranks that make different ones are told, and take nothing else."""
        self.count, self._verb = self.count + 1, verb

    @functools.cached_property
    def most_alive(self) -> int:
        """The most pullbacks that the schedule has alive at once at one place."""
        return max(alive(tasks) for tasks in self._schedule.places)

    def _packed(self, content: object) -> Packed:
        return Packed((self._identity, self.count, self._verb, content))

    def _told(self, error: BaseException) -> Failure:
        return failure_of(error, "pipeline", self.rank)

    def _send(self, rank: int, ident: MessageId, packed: Packed) -> None:
        self._gone.add((rank, ident))
        self._messages.send(rank, ident, packed)

    def _received(self, rank: int, ident: MessageId) -> Any:
        message: Any = self._messages.receive(rank, ident)
        identity, count, verb, content = message
        if (identity, count, verb) != (self._identity, self.count, self._verb):
            for other in range(len(self.seats)):  # who will see at the end of his call that this one is another
                if other != self.rank and (other, ALL) not in self._gone:
                    self._send(other, ALL, self._packed(None))
            self._messages.hurry(1.0)
            raise Lost(
                f"pipeline [{self._identity[:4]}]: rank {self.rank} of its group makes its call {self.count}, of "
                f"{self._verb}, and rank {rank} call {count}, of {verb}, of pipeline [{identity[:4]}]; expected the "
                "same calls in the same order on all ranks. Start the ranks anew: messages of both calls are under way."
            )
        return content

    def partner(self, stage: int, rank: int | None = None) -> int:
        """The rank at a stage's place that has the same examples, and the same slices of leaves, as this or another."""
        seat = self.seats[self.rank if rank is None else rank]
        return self.seats.index(seat._replace(place=self._schedule.place_of(stage)))

    def _ident(self, task: Task) -> MessageId:
        """What a message is known by, seen from the stage that gives it."""
        assert task.peer is not None
        sends = task.kind.value == "S"
        source, target = (task.stage, task.peer) if sends else (task.peer, task.stage)
        stages, count = self._schedule.stages, self._schedule.microbatches
        number = (source * stages + target) * count + task.microbatch
        return MessageId((source, target), task.microbatch, 1 + number)

    def send(self, task: Task, values: Sequence[object]) -> None:
        """Sends values to the rank that takes them."""
        assert task.peer is not None
        self._send(self.partner(task.peer), self._ident(task), self._packed(tuple(values)))

    def fail(self, task: Task, error: BaseException) -> None:
        """Sends a failure in the place of what a task would have sent, or of what it could not send."""
        assert task.peer is not None
        rank, ident = self.partner(task.peer), self._ident(task)
        if (rank, ident) not in self._gone:
            self._send(rank, ident, self._packed(self._told(error)))

    def need_same(self, said: Sequence[tuple[object, int]], stage: int) -> None:
        """Refuses shares of a batch that differ between places: microbatches would count there what they do not here.

        Args:
            said: by each rank, something and its number of examples.
        """
        for rank, (_, examples) in enumerate(said):
            _, other = said[self.partner(stage, rank)]
            if examples != other:
                raise ValueError(
                    f"pipeline: rank {rank} of its group was given {examples} examples, and the rank of the last "
                    f"stage that has its share {other}; expected the same share of the batch in all places."
                )

    def begin(self, task: Task) -> None:
        """Starts to receive what a task will wait for."""
        assert task.peer is not None
        self._messages.begin(self.partner(task.peer), self._ident(task))

    def receive(self, task: Task) -> Sequence[object]:
        """The values that another stage gives to this one; raises `Failed` if that could not make them."""
        assert task.peer is not None
        values = self._received(self.partner(task.peer), self._ident(task))
        if isinstance(values, Failure):
            raise Failed(values)
        return values

    def exchange(self, own: object, error: BaseException | None) -> list[Any]:
        """What every rank says, in rank order; raises on all of them if one has failed.

        Args:
            own: a small tree.
        """
        failed = self._told(error) if error is not None else None
        try:
            packed = self._packed((failed, own))
        except Exception as caught:  # of what cannot be sent
            error, own = error or caught, None
            failed = self._told(error)
            packed = self._packed((failed, None))
        ranks = len(self.seats)
        others = [rank for rank in range(ranks) if rank != self.rank]
        try:
            for rank in others:
                self._send(rank, ALL, packed)
            for rank in others:
                self._messages.begin(rank, ALL)
            said = {rank: self._received(rank, ALL) for rank in others}
            said[self.rank] = failed, own
            self._messages.end_call()
        except Lost as lost:
            if error is None or isinstance(error, Failed):
                raise
            error.add_note(f"The other ranks could not be told: {lost}")
            raise error from lost
        self._gone.clear()
        if error is not None and not isinstance(error, Failed):
            raise error
        first = next((said[rank][0] for rank in range(ranks) if said[rank][0] is not None), None)
        if first is not None:
            where = f"rank {first.rank} at place {self.seats[first.rank].place}"
            raise error_of(first._replace(message=f"pipeline: {where} failed: {first.kind}: {first.message}"))
        return [said[rank][1] for rank in range(ranks)]


def shapes_of(tree: object) -> object:
    """A tree without its tensors' memory, but for 0-d ones, which are small: what the other places are told."""
    small = lambda x: torch.empty_like(x, device="meta") if isinstance(x, torch.Tensor) and x.ndim else x
    return pytree.map_leaves(small, tree)
