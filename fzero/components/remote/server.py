"""A rank's values for readers in other processes, over channels; and a rank as such a reader asks it."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero.channels import Address, Connection, Listener, TimedOut, connect
from fzero.components.remote import gpus
from fzero.components.remote.failure import Failed, Failure
from fzero.components.remote.host import Host
from fzero.components.remote.pull import lost
from fzero.components.remote.values import Box, Meta, Name

IDLE = 1e6  # seconds that a reader may ask nothing; its end is noticed at once
CONNECT_SECONDS = 10.0  # that opening a connection may take
_CPU = torch.device("cpu")
_log = logging.getLogger("fzero.components")


class Server:
    """Answers readers, each on a thread of its own, until it is closed."""

    def __init__(self, served: Host, token: bytes, name: str, host: str | None = None) -> None:
        self._served = served
        self._listener = Listener(token, host, name)
        self.address: Address = self._listener.address
        threading.Thread(target=self._accept, name=f"fzero-serve-{name}", daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept(IDLE)
            except TimedOut:
                continue
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), name="fzero-answer", daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        def alive() -> None:
            connection.send(("wait",))

        owner = gpus.Owner()
        try:
            while True:
                request: Any = connection.receive(IDLE)
                answer = _answered(self._served, request, alive)
                tensors = answer[1] if isinstance(answer[1], list) and request[0] == "blocks" else []
                on_one = gpus.lie_on(tensors, request[1][1]) if tensors else False
                if not (on_one and owner.give(tensors, connection.send, lambda: connection.receive(IDLE))):
                    connection.send(answer)
                del request, answer, tensors
        except OSError:
            connection.close()
        except Exception as error:  # what came is no request
            _log.warning("closed the connection to %s: %r", connection.peer, error, exc_info=True)
            connection.close()
        finally:
            owner.close()


def _answered(served: Host, request: Any, alive: Callable[[], None]) -> tuple[str, object]:
    """What a reader is answered."""
    kind, asked = request
    try:
        if kind == "blocks":
            return "answer", served.blocks(asked[0])
        assert kind in ("metas", "trees", "arrived", "ended"), kind
        return "answer", getattr(served, kind)(asked, alive)
    except Failed as failed:
        return "failed", failed.failure


class RemoteSource:
    """A rank in another process, as readers here ask it: each with a connection of its own.

    Args:
        where: its address and token, its component by name and by identity, the rank.
        patience: seconds without a sign of life.
    """

    def __init__(self, where: Any, patience: float) -> None:
        self._address, self._token, self._component, self._identity, self._rank = where
        self._patience = patience
        self._idle: list[tuple[Connection, gpus.Reader]] = []
        self._left = False

    def left(self) -> None:
        """Nothing more will be asked: connections are closed, those that wait for an answer once it has come."""
        self._left = True
        while self._idle:
            _close(*self._idle.pop())

    def metas(self, names: Sequence[Name]) -> list[Meta | Failure]:
        return self._ask("metas", list(names))

    def blocks(self, wanted: Sequence[tuple[Name, Box | None]], device: torch.device = _CPU) -> list[torch.Tensor]:
        return self._ask("blocks", (list(wanted), gpus.name_of(device)), device)

    def trees(self, call: int) -> object:
        return self._ask("trees", call)

    def arrived(self, call: int) -> Failure | None:
        return self._ask("arrived", call)

    def ended(self, call: int) -> int:
        return self._ask("ended", call)

    def _ask(self, kind: str, asked: object, device: torch.device = _CPU) -> Any:
        connection, reader = None, gpus.Reader()
        try:
            try:
                connection, reader = self._idle.pop()
            except IndexError:
                connection = connect(self._address, self._token, min(CONNECT_SECONDS, self._patience))
            hear = functools.partial(connection.receive, self._patience)
            connection.send((kind, asked))
            reply: Any = ("wait",)
            while reply[0] == "wait":
                reply = hear()
            if reply[0] == "offer":
                taken = reader.take(gpus.Offer(*reply[1]), device, connection.send, hear)
                reply = hear() if taken is None else ("answer", taken)
        except BaseException as error:  # also an interrupt, with an answer on its way
            if connection is not None:
                _close(connection, reader)
            if isinstance(error, TimedOut):
                message = f"rank {self._rank} of component {self._component!r} gave no sign of life: {error}"
                raise Failed(Failure("TimeoutError", message, self._component, self._rank)) from None
            if isinstance(error, OSError):
                raise lost(self._identity, self._component, self._rank, f"cannot be reached ({error})") from None
            raise
        self._idle.append((connection, reader))
        if self._left:
            self.left()
        if reply[0] == "failed":
            raise Failed(reply[1])
        return reply[1]


def _close(connection: Connection, reader: gpus.Reader) -> None:
    reader.close()
    connection.close()
