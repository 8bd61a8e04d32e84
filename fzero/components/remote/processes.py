"""Ranks that are processes of this machine, in a gloo group of their own; they end with who started them."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import pickle
import secrets
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero.channels import Address, Connection, Listener, connect
from fzero.comm import backend
from fzero.components.remote.building import built_by, calls_run_in
from fzero.components.remote.failure import failure_of
from fzero.components.remote.host import Host
from fzero.components.remote.link import Link, Settings
from fzero.components.remote.pull import Table
from fzero.components.remote.server import IDLE, RemoteSource, Server, sent_source

WORDS = 4000  # bytes of a rank's stderr that are kept
NOTICED = 1.0  # seconds in which a process that has gone is seen to have ended

Heard = Callable[[int, tuple[Any, ...]], object]


class ProcessLink(Link):
    """A rank in another process of this machine.

    Args:
        words: what its stderr is read from.
        store: of its process group, which lives as long as this.
    """

    def __init__(self, settings: Settings, rank: int, process: Any, words: Any, store: object) -> None:
        self._settings, self._rank, self._process, self._store = settings, rank, process, store
        self._asking = threading.Lock()
        self._connection: Connection | None = None
        self._where: tuple[object, ...] = ()
        self._source: RemoteSource | None = None
        self._words = bytearray()
        self._reading = threading.Thread(target=self._read_words, args=(words,), name="fzero-words", daemon=True)
        self._reading.start()

    def connected(self, connection: Connection, address: Address, token: bytes, heard: Heard) -> None:
        """The rank has come: from now on what it reports is heard, and that it has gone."""
        self._connection = connection
        self._where = sent_source(address, token, self._settings.component, self._settings.identity, self._rank)
        self._source = RemoteSource(self._where, self._settings.timeout)
        threading.Thread(target=self._listen, args=(heard,), name="fzero-reports", daemon=True).start()

    def send(self, message: tuple[Any, ...]) -> None:
        if self._connection is None:
            raise OSError(f"rank {self._rank} has not come")
        if message[0] == "table":
            message = ("table", message[1], tuple(message[2]))
        self._connection.send(message, self._settings.timeout)

    def source(self, local: bool) -> Any:
        return self._source if local else self._where

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
        if self._connection is not None:
            self._connection.close()
        if self._source is not None:
            self._source.close()

    def join(self, timeout: float) -> None:
        multiprocessing.connection.wait([self._process.sentinel], timeout)

    def _listen(self, heard: Heard) -> None:
        connection = self._connection
        assert connection is not None
        try:
            while True:
                heard(self._rank, connection.receive(IDLE))  # type: ignore[arg-type]
        except OSError as error:
            why = str(error)
        self.join(NOTICED)
        heard(self._rank, ("died", *(self.gone() or (f"cannot be reached any more ({why})", ""))))

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
    """Starts the ranks of a component; see `threads.start`.

    Raises:
        TypeError: `build` cannot be pickled.
        TimeoutError: a process did not come up.
    """
    try:
        job = pickle.dumps(build)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"fz.remote(on='processes'): {build!r} cannot be pickled ({error}). Define it at the top of a module, or "
            "use functools.partial of such a function."
        ) from error
    context, token = _context(), secrets.token_bytes(32)
    links: list[ProcessLink] = []
    try:
        with Listener(token, name=f"the control of {settings.component!r}") as listener:
            store = backend.dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            for rank in range(settings.ranks):
                words, stderr = context.Pipe(duplex=False)
                arguments = (job, settings, rank, listener.address, token, store.port, stderr, list(sys.path))
                name = f"{settings.component}-{rank}"
                process = context.Process(target=_main, args=arguments, daemon=True, name=name)
                process.start()
                stderr.close()
                links.append(ProcessLink(settings, rank, process, words, store))
            _take(listener, links, token, settings.timeout, _weakly(heard))
    except BaseException:
        for link in links:
            link.end()
        raise
    return links


def _weakly(heard: Heard) -> Heard:
    """The same method, without holding its object."""
    owner = weakref.WeakMethod(heard)  # type: ignore[arg-type]

    def report(rank: int, message: tuple[Any, ...]) -> None:
        method = owner()
        if method is not None:
            method(rank, message)

    return report


def _take(listener: Listener, links: Sequence[ProcessLink], token: bytes, timeout: float, heard: Heard) -> None:
    """Waits until all ranks have come, or one of them has ended."""
    deadline = time.monotonic() + timeout
    waiting = set(range(len(links)))
    while waiting:
        for rank in waiting:
            if (gone := links[rank].gone()) is not None:
                raise RuntimeError(f"fz.remote: rank {rank} {gone[0]} before it came up. It said:\n{gone[1]}")
        try:
            connection = listener.accept(0.5)
        except TimeoutError:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"fz.remote: the processes of ranks {sorted(waiting)} did not come up in {timeout:g} seconds."
                ) from None
            continue
        hello: Any = connection.receive(max(1.0, deadline - time.monotonic()))
        rank, address = hello
        links[rank].connected(connection, address, token, heard)
        waiting.discard(rank)


def _context() -> multiprocessing.context.SpawnContext | multiprocessing.context.ForkServerContext:
    """How processes begin: forked from one that does nothing but have imported this, which takes seconds, once."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the controlling process
    serve(lambda: pickle.loads(job), settings, rank, address, token, ("127.0.0.1", port), None)


def end_with_parent() -> None:
    """Has this process killed when its parent ends, where the system can do that."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


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
    name = f"rank {rank} of {settings.component!r}"
    connection = connect(address, token, settings.timeout, name)
    around = functools.partial(calls_run_in, settings)
    host = Host(settings.component, settings.identity, rank, connection.send, settings.timeout, around)
    server = Server(host, token, name, reachable)
    connection.send((rank, server.address))
    threading.Thread(target=_hear, args=(connection, host, settings), name="fzero-calls", daemon=True).start()
    shared = backend.dist.TCPStore(*store, is_master=False, wait_for_workers=False)
    backend.dist.init_process_group(
        "gloo",
        store=shared,
        rank=rank,
        world_size=settings.ranks,
        timeout=datetime.timedelta(seconds=settings.timeout),
    )
    try:
        built = built_by(build(), rank)
    except Exception as error:
        connection.send(("broken", tuple(failure_of(error, settings.component, rank))))
        connection.close()
        return
    host.has_built(built)
    del built
    connection.send(("ready", tuple(host.part.place)))
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
    name, sources = sent

    def source(where: Any) -> Any:
        return host if where[3:] == (settings.identity, host.rank) else RemoteSource(where, settings.timeout)

    return Table(name, [[[source(where) for where in copies] for copies in same] for same in sources])
