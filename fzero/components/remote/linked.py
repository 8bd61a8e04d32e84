"""Ranks in other processes, as the controlling process reaches them: by channels, however they were started."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from fzero.channels import Address, Connection, Listener
from fzero.components.remote.link import NOTICED, Link, Message, Settings
from fzero.components.remote.server import IDLE, RemoteSource

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
