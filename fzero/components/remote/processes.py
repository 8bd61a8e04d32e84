"""Ranks that are processes of this machine, in a gloo group of their own; they end with who started them."""

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
from collections.abc import Callable, Sequence
from typing import Any

from fzero.base.forking import forking_context, loaded, pickled, startable
from fzero.channels import Address, Listener
from fzero.comm import backend
from fzero.components.remote.link import NOTICED, Link, Settings
from fzero.components.remote.linked import ChannelLink, Heard, serve, take_all, weakly

_WHO = "fz.remote(on='processes')"
WORDS = 4000  # bytes of a rank's stderr that are kept


class ProcessLink(ChannelLink):
    """A rank in another process of this machine.

    Args:
        words: what its stderr is read from.
        store: of its process group, which lives as long as this.
    """

    def __init__(self, settings: Settings, rank: int, process: Any, words: Any, store: object) -> None:
        super().__init__(settings, rank)
        self._process, self._store = process, store
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
    """Starts the ranks of a component; see `threads.start`.

    Raises:
        TypeError: `build` cannot be pickled.
        TimeoutError: a process did not come up.
    """
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
