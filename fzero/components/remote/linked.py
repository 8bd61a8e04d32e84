"""Ranks in other processes, reached by channels, however they were started: in the controlling process, and there."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero.channels import Address, Connection, Listener, connect
from fzero.comm import backend
from fzero.components.remote.building import join_group
from fzero.components.remote.host import Host
from fzero.components.remote.link import NOTICED, Link, Message, Settings
from fzero.components.remote.pull import Table
from fzero.components.remote.server import IDLE, RemoteSource, Server

Heard = Callable[[int, Message], object]


class ChannelLink(Link):
    """A rank in another process."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self.settings, self.rank = settings, rank
        self._connection: Connection | None = None
        self._where: tuple[object, ...] = ()
        self._source: RemoteSource | None = None

    def connected(self, connection: Connection, address: Address, token: bytes, heard: Heard) -> None:
        """The rank has come: from now on what it reports is heard, and that it has gone."""
        self._connection = connection
        own = self.settings
        self._where = address, token, own.component, own.identity, self.rank
        self._source = RemoteSource(self._where, self.settings.timeout)
        threading.Thread(target=self._listen, args=(heard,), name="fzero-reports", daemon=True).start()

    def send(self, message: Message) -> None:
        if self._connection is None:
            raise OSError(f"rank {self.rank} has not come")
        if message[0] == "table":
            _, identity, table = message
            message = ("table", identity, (table.name, list(table.places), list(table.sources)))
        self._connection.send(message, self.settings.timeout)

    def source(self, local: bool) -> Any:
        return self._source if local else self._where

    def end(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._source is not None:
            self._source.left()

    def _listen(self, heard: Heard) -> None:
        connection = self._connection
        assert connection is not None
        try:
            while True:
                heard(self.rank, connection.receive(IDLE))  # type: ignore[arg-type]
        except OSError as error:
            why = str(error)
        except Exception as error:
            why = f"it sent what is no report: {error!r}"
        self.join(5 * NOTICED)  # the end of a process is noticed late on a busy machine
        heard(self.rank, ("died", *(self.gone() or (f"cannot be reached any more ({why})", ""))))


def weakly(heard: Heard) -> Heard:
    """The same method, without holding its object."""
    owner = weakref.WeakMethod(heard)  # type: ignore[arg-type]

    def report(rank: int, message: Message) -> None:
        method = owner()
        if method is not None:
            method(rank, message)

    return report


def take_all(listener: Listener, links: Sequence[ChannelLink], token: bytes, timeout: float, heard: Heard) -> None:
    """Waits until all ranks have come, or one of them has ended."""
    deadline = time.monotonic() + timeout
    waiting = set(range(len(links)))
    while waiting:
        ended = {rank: gone for rank in waiting if (gone := links[rank].gone()) is not None}
        with contextlib.suppress(OSError):  # nobody has come, or one that has ended
            connection = listener.accept(0.5)
            hello: Any = connection.receive(max(1.0, deadline - time.monotonic()))
            rank, address = hello
            links[rank].connected(connection, address, token, heard)
            waiting.discard(rank)
            continue  # what one that has ended said before is heard first
        if ended:
            rank, (how, words) = next(iter(ended.items()))
            raise RuntimeError(f"fz.remote: rank {rank} {how} before it came up. It said:\n{words}")
        if waiting and time.monotonic() > deadline:
            raise TimeoutError(
                f"fz.remote: the processes of ranks {sorted(waiting)} did not come up in {timeout:g} seconds."
            )


# ---- what runs in a rank's process


def serve(
    build: Callable[[], Callable[[int], object]],
    settings: Settings,
    rank: int,
    address: Address,
    token: bytes,
    store: tuple[str, int],
    reachable: str | None,
) -> None:
    """Runs one rank in this process, until its controlling process closes it or is gone.

    Args:
        build: gives the user's function.
        store: where the store of the process group is.
        reachable: the name by which other machines reach this one; None for this machine only.
    """
    torch.set_num_threads(settings.threads)
    torch.set_default_dtype(settings.dtype)
    name = f"rank {rank} of {settings.component!r}"
    connection = connect(address, token, settings.timeout, name)
    host = Host(settings, rank, connection.send)
    server = Server(host, token, name, reachable)
    connection.send((rank, server.address))
    threading.Thread(target=_hear, args=(connection, host, settings), name="fzero-calls", daemon=True).start()
    shared = backend.dist.TCPStore(*store, is_master=False, wait_for_workers=False)
    join_group(settings, rank, shared)
    if host.builds(build):
        host.run()
        server.close()
    connection.close()


def _hear(connection: Connection, host: Host, settings: Settings) -> None:
    """Takes what the controlling process sends; ends this process when that one has gone."""
    try:
        while True:
            message: Any = connection.receive(IDLE)
            if message[0] == "table":
                message = ("table", message[1], _table(message[2], host, settings))
            host.take(message)
            if message[0] == "close":
                return
            del message
    except OSError:
        os._exit(1)


def _table(sent: Any, host: Host, settings: Settings) -> Table:
    """A table of sources as this rank asks them; itself without a message."""
    name, places, sources = sent

    def source(where: Any) -> Any:
        own = where[3:5] == (settings.identity, host.rank)
        return host if own else RemoteSource(where, settings.timeout)

    return Table(name, places, [source(where) for where in sources])
