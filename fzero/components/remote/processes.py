"""Ranks in other processes, reached by channels; those on this machine, in a gloo group, end with who started them."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import secrets
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero.base.forking import forking_context, loaded, pickled, startable
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


_WHO = "fz.remote(on='processes')"
WORDS = 4000  # bytes of a rank's stderr that are kept


class ProcessLink(ChannelLink):
    """A rank in another process of this machine."""

    def __init__(self, settings: Settings, rank: int, process: Any, words: Any, store: object) -> None:
        super().__init__(settings, rank)
        self._process, self._store = process, store  # of its process group, which lives as long as this
        self._asking = threading.Lock()
        self._words = bytearray()
        self._reading = threading.Thread(target=self._read_words, args=(words,), name="fzero-words", daemon=True)
        self._reading.start()

    def gone(self) -> tuple[str, str] | None:
        with self._asking:  # the code is read once
            code = self._process.exitcode
        if code is None:
            return None
        cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has exited with code {code}"
        self._reading.join(0.5)
        return cause, bytes(self._words[-WORDS:]).decode(errors="replace")

    def end(self) -> None:
        with self._asking:
            self._process.kill()
        self.join(NOTICED)
        super().end()

    def join(self, timeout: float) -> None:
        multiprocessing.connection.wait([self._process.sentinel], timeout)

    def _read_words(self, pipe: multiprocessing.connection.Connection) -> None:
        """Keeps the end of what the rank writes to its stderr, and passes it on."""
        with contextlib.suppress(OSError), pipe:
            while data := os.read(pipe.fileno(), 1 << 16):
                self._words += data
                del self._words[:-WORDS]
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(data.decode(errors="replace"))
                    sys.stderr.flush()


def start(build: Callable[[int], object], settings: Settings, heard: Heard) -> Sequence[Link]:
    """Starts the ranks of a component; see `threads.start`."""
    job = pickled(build, _WHO)
    context, token = forking_context(__name__), secrets.token_bytes(32)
    links: list[ProcessLink] = []
    try:
        with Listener(token, name=f"the control of {settings.component!r}") as listener:
            store = backend.dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            for rank in range(settings.ranks):
                words, stderr = context.Pipe(duplex=False)
                arguments = (job, settings, rank, listener.address, token, store.port, stderr, list(sys.path))
                name = f"{settings.component}-{rank}"
                process = context.Process(target=_main, args=arguments, daemon=True, name=name)
                with startable():
                    process.start()
                stderr.close()
                links.append(ProcessLink(settings, rank, process, words, store))
            take_all(listener, links, token, settings.timeout, weakly(heard))
    except BaseException:
        for link in links:
            link.end()
        raise
    return links


# ---- what runs in a rank's process


def _main(
    job: bytes,
    settings: Settings,
    rank: int,
    address: Address,
    token: bytes,
    port: int,
    stderr: multiprocessing.connection.Connection,
    path: list[str],
) -> None:
    end_with_parent()
    os.dup2(stderr.fileno(), 2)
    stderr.close()
    sys.path[:] = path
    # Ctrl-C in a terminal, and what a job's manager sends to all, is for the controlling process, which may yet save
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve(lambda: loaded(job, _WHO, "on='threads'"), settings, rank, address, token, ("127.0.0.1", port), None)


def end_with_parent() -> None:
    """Has this process killed when the one that it was forked from ends, where the system can do that.

    That one ends with the controlling process, unless others keep it: whoever was forked from it does, to fork more.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    with contextlib.suppress(OSError, AttributeError, TypeError):
        os.close(multiprocessing.forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
        multiprocessing.forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
