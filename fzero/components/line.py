"""Line: this rank's place in a pipeline whose places are ranks of a process group, and its messages to the others."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch

from fzero.base import pytree
from fzero.comm import backend
from fzero.comm.backend import Group
from fzero.components.messages import Ident, Lost, Messages
from fzero.components.remote.failure import Failed, Failure, error_of, failure_of
from fzero.schedules.check import alive
from fzero.schedules.task import Schedule, Task

ALL: Ident = ("all",)  # what a rank says to all others at the end of a call


class Line:
    """One rank of a pipeline over ranks.

    What a rank says at the end of a call comes at once after an error: who waits for anything else of it sees that, and
    ends the call in the same way. So nobody waits for what does not come, and every rank raises.

    Args:
        group: of the ranks of the pipeline, one a place.
        ranks: of each place, its rank in the group.
        identity: what tells this pipeline from others over the same ranks.

    Attributes:
        count: the number of the call that is running.
    """

    def __init__(self, group: Group, schedule: Schedule, ranks: Sequence[int], identity: str) -> None:
        self.rank, self.ranks = backend.rank_in(group), ranks
        self.place = ranks.index(self.rank)
        self._messages, self._schedule = Messages.of(group), schedule
        self.count, self._verb, self._identity = 0, "", identity

    def begin_call(self, verb: str) -> None:
        """Every message says which call it is of: ranks that make different ones are told, and take nothing else."""
        self.count, self._verb = self.count + 1, verb

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

    def rank_of(self, stage: int) -> int:
        """The rank of the place of a stage."""
        return self.ranks[self._schedule.place_of(stage)]

    def send(self, task: Task, values: Sequence[object]) -> None:
        """Sends values to the stage that takes them."""
        assert task.peer is not None
        self._send(self.rank_of(task.peer), (task.stage, task.peer, task.microbatch), tuple(values))

    def receive(self, task: Task) -> Sequence[object]:
        """The values that another stage gives to this one; raises `Failed` if its rank has failed."""
        assert task.peer is not None
        return self._received(self.rank_of(task.peer), (task.peer, task.stage, task.microbatch))

    def need_same(self, examples: Sequence[int], stage: int) -> None:
        """Refuses shares of a batch that differ between places: microbatches would count there what they do not here.

        Args:
            examples: those of each rank.
        """
        expected = examples[self.rank_of(stage)]
        for rank, own in enumerate(examples):
            if own != expected:
                raise ValueError(
                    f"pipeline: rank {rank} of its group was given {own} examples, and the rank of the last stage "
                    f"{expected}; expected the same share of the batch in all places."
                )

    def exchange(self, own: object, error: BaseException | None) -> list[Any]:
        """What every rank says, in rank order; raises on all of them if one has failed.

        Args:
            own: a small tree.
        """
        failed = self._told(error) if error is not None else None
        others = [rank for rank in self.ranks if rank != self.rank]
        for rank in others:
            with contextlib.suppress(Lost):  # which shows below
                try:
                    self._send(rank, ALL, (failed, own))
                except TypeError as caught:  # of what cannot be sent
                    error = error or caught
                    failed, own = self._told(error), None
                    self._send(rank, ALL, (failed, None))
        if isinstance(error, Lost):  # all are told, and some may say nothing more
            raise error
        said = {self.rank: (failed, own)}
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
        every = [said[rank] for rank in sorted(said)]
        first = next((failure for failure, _ in every if failure is not None), None)
        if first is not None:
            where = f"rank {first.rank} at place {self.ranks.index(first.rank)}"
            raise error_of(first._replace(message=f"pipeline: {where} failed: {first.kind}: {first.message}"))
        return [own for _, own in every]


def shapes_of(tree: object) -> object:
    """A tree without its tensors' memory, but for 0-d ones, which are small: what the other places are told."""
    small = lambda x: torch.empty_like(x, device="meta") if isinstance(x, torch.Tensor) and x.ndim else x
    return pytree.map_leaves(small, tree)
