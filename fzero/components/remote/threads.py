"""Ranks that are threads of this process, with a process group of their own; values go by reference."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from fzero.base import thread_state
from fzero.comm import backend, worlds
from fzero.components.remote.building import join_group
from fzero.components.remote.failure import Failure, said_of, trace_of
from fzero.components.remote.host import Host, Order
from fzero.components.remote.link import Link, Message, Settings
from fzero.components.remote.processes import weakly
from fzero.components.remote.server import Server


class ThreadLink(Link):
    """A rank on a thread: messages are calls."""

    local = True

    def __init__(self, host: Host) -> None:
        self.host = host
        self.thread: threading.Thread | None = None
        self._server: tuple[Server, bytes] | None = None  # for readers in other processes

    def send(self, message: Message) -> None:
        self.host.take(message)

    def source(self, local: bool) -> Any:
        host = self.host
        if local:
            return host
        if self._server is None:
            token = secrets.token_bytes(32)
            self._server = Server(host, token, f"rank {host.rank} of {host.component!r}"), token
        server, token = self._server
        return server.address, token, host.component, host.identity, host.rank

    def end(self) -> None:
        host, server = self.host, self._server
        if server is not None:
            server[0].close()
        host.close(Failure("ComponentDied", "has ended", host.component, host.rank, lost=host.identity))

    def join(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(timeout)
        self.host.join(max(0.0, deadline - time.monotonic()))
        for thread in (self.thread, self.host.fetching):
            while thread is not None and not thread.is_alive() and _is_there(thread) and time.monotonic() < deadline:
                time.sleep(0.001)


def _is_there(thread: threading.Thread) -> bool:
    """Whether a thread that Python has done with is still being ended: torch frees there what it keeps by thread, and
    would abort the interpreter if that had ended meanwhile."""
    return os.path.exists(f"/proc/self/task/{thread.native_id}")


def start(build: Callable[[int], object], settings: Settings, heard: Callable[..., object]) -> list[ThreadLink]:
    """Starts the ranks of a component; each reports `("ready", ...)` or `("broken", ...)` first.

    Args:
        heard: `heard(rank, message)` takes what they report, on their threads.
    """
    store = backend.dist.HashStore()
    thread_state.prepare_for_fakes()
    for _ in range(settings.ranks):
        worlds.install()  # until the last of them has ended
    links: list[ThreadLink] = []
    order = Order()
    for rank in range(settings.ranks):
        host = Host(settings, rank, functools.partial(weakly(heard), rank), order)
        link = ThreadLink(host)
        links.append(link)
        arguments = (build, settings, host, store)
        name = f"fzero-{settings.component}-{rank}"
        link.thread = threading.Thread(target=_run, args=arguments, name=name, daemon=True)
        link.thread.start()
    return links


def _run(build: Callable[[int], object], settings: Settings, host: Host, store: backend.Store) -> None:
    hook = sys.excepthook
    try:
        torch.set_num_threads(settings.threads)
        with worlds.own_world():
            try:
                join_group(settings, host.rank, store)
                sys.excepthook = hook  # each group that begins wraps it once more
                if host.builds(lambda: build):
                    host.run()
            except BaseException as left:
                host.report(("died", f"has left by {said_of(left)}", trace_of(left)))
            finally:
                if backend.dist.is_initialized():
                    with contextlib.suppress(RuntimeError):
                        backend.dist.destroy_process_group()
    finally:
        host.let_go()
        worlds.uninstall()
