"""Messages: trees between ranks of one process group, received in whatever order they are asked for."""

from __future__ import annotations

import io
import json
import os
import pickle
import secrets
import socket
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from fzero.channels import Connection, Listener, connect
from fzero.channels.address import machine
from fzero.comm import backend
from fzero.comm.backend import Group

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

        Raises:
            TypeError: there is something in it that cannot be sent.
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
