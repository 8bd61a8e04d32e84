"""One rank in a process of its own: what it does from its first message to its last, however it was started."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from fzero.channels import Address, Connection, connect
from fzero.comm import backend
from fzero.components.remote.building import join_group
from fzero.components.remote.host import Host
from fzero.components.remote.link import Settings
from fzero.components.remote.pull import Table
from fzero.components.remote.server import IDLE, RemoteSource, Server


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
