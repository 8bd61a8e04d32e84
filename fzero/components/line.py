"""This rank's place in a pipeline whose places are ranks of a process group, and its messages to the others."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pickle
import secrets
import socket
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fzero.base import pytree
from fzero.channels import Connection, Listener, connect
from fzero.channels.listener import machine
from fzero.comm import backend
from fzero.comm.backend import Group
from fzero.components.remote.failure import Failed, Failure, error_of, failure_of
from fzero.schedules.check import alive
from fzero.schedules.task import Schedule, Task

Ident = tuple[object, ...]  # what a message is known by on both ends, which no other one under way there has


class Lost(RuntimeError):
    """A message did not come, or could not be sent: what is left of the call is given up."""


class Messages:
    """Sends and receives trees, over a connection to each other rank. All ranks make it at the same time."""

    @staticmethod
    def of(group: Group) -> Messages:
        """Those of a group, which all pipelines over it share: so ranks that call another one are told."""
        if group not in _made:
            _made[group] = Messages(group)
        return _made[group]

    def __init__(self, group: Group) -> None:
        self._members, self._timeout = backend.members(group), backend.timeout_of(group)
        self._rank = rank = backend.rank_in(group)
        machines = {*backend.gather_strings(machine(), group)}
        alone = len(machines) == 1 and "" not in machines  # on this machine
        with Listener(token := secrets.token_bytes(32), None if alone else _own_host()) as listener:
            said = backend.gather_strings(json.dumps([token.hex(), *listener.address]), group)
            heard = [json.loads(text) for text in said]
            self._connections: dict[int, Connection] = {}
            for other in range(rank + 1, len(heard)):
                own, *address = heard[other]
                self._connections[other] = connect(tuple(address), bytes.fromhex(own), self._timeout, f"rank {rank}")
            for _ in range(rank):
                connection = listener.accept(self._timeout)
                self._connections[int(connection.peer.removeprefix("rank "))] = connection
        self._came: dict[tuple[int, Ident], Any] = {}
        weakref.finalize(self, _close, self._connections)

    def send(self, rank: int, ident: Ident, tree: object) -> None:
        """Sends a tree, whose tensors are copied.

        It is pickled: it goes between ranks of one program, which run the same code.
        """
        pickler = _Pickler(out := io.BytesIO())
        try:
            pickler.dump(tree)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"pipeline: got a value that cannot be sent to another place ({error}), expected dense tensors, "
                "numbers, texts and what else can be pickled, in containers that can."
            ) from None
        try:
            self._connections[rank].send((ident, out.getvalue(), pickler.tensors), self._timeout)
        except OSError as error:
            raise self._lost(rank, ident, error) from error

    def receive(self, rank: int, ident: Ident, last: Ident) -> tuple[bool, Any]:
        """Waits for a tree, or for the last one of that rank, if that comes first: whether it is the one, and it.

        What is last stays until all is cleared.
        """
        while not (ours := (rank, ident) in self._came) and (rank, last) not in self._came:
            try:
                other, *content = self._connections[rank].receive(self._timeout)  # type: ignore[misc]
            except OSError as error:
                raise self._lost(rank, ident, error) from error
            self._came[rank, other] = content
        return ours, _Unpickler(*self._came[rank, ident if ours else last]).load()

    def clear(self) -> None:
        """Forgets what has come, once the last message of a call has from every rank."""
        self._came.clear()

    def _lost(self, rank: int, ident: Ident, error: OSError) -> Lost:
        own, other = self._members[self._rank], self._members[rank]
        return Lost(
            f"pipeline: the message {ident} between rank {own} and rank {other} did "
            f"not come through: {error} Has that rank ended, or left out a call that this one made? All ranks of "
            "a pipeline make the same calls, in the same order."
        )


_made: weakref.WeakKeyDictionary[Group, Messages] = weakref.WeakKeyDictionary()


def _own_host() -> str:
    """The address of this machine by which it reaches that of the first rank, and is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:  # nothing is sent
        sock.connect((os.environ.get("MASTER_ADDR", socket.gethostname()), 9))
        return sock.getsockname()[0]


def _close(connections: Mapping[int, Connection]) -> None:
    for connection in connections.values():
        connection.close()


class _Pickler(pickle.Pickler):
    """Pickles a tree, and lists its tensors."""

    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: object) -> tuple[int, tuple[int, ...]] | None:
        if not isinstance(obj, torch.Tensor) or obj.device.type == "meta":
            return None
        if obj.layout != torch.strided:
            raise TypeError(f"a tensor of layout {obj.layout} and shape {tuple(obj.shape)}: say .to_dense()")
        # in the order in which it lies in memory: sums over it are then formed in the same order there
        order = tuple(sorted(range(obj.ndim), key=lambda dim: -obj.stride(dim)))
        order = order if obj.permute(order).is_contiguous() else tuple(range(obj.ndim))
        self.tensors.append(obj.detach().permute(order))
        return len(self.tensors) - 1, order


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, pid: tuple[int, tuple[int, ...]]) -> torch.Tensor:
        number, order = pid
        return self._tensors[number].permute(sorted(range(len(order)), key=order.__getitem__))


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
        """
        expected = examples[self.rank_of(stage)]
        for rank, own in enumerate(examples):
            if own != expected:
                raise ValueError(
                    f"pipeline: rank {rank} of its group was given {own} examples, and the rank of the last stage "
                    f"{expected}; expected the same share of the batch in all places."
                )

    def exchange(self, own: object, error: BaseException | None) -> list[Any]:
        """What every rank says, in rank order; raises on all of them if one has failed."""
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
