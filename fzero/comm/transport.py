"""Gloo's transport threads: how Linux schedules them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_TASKS = Path("/proc/self/task")
_NAME = "gloo_tcp_loop"  # of the thread that serves the connections of one process group


def threads() -> Iterator[int]:
    """The ids of this process's gloo transport threads; none where the system does not tell."""
    with contextlib.suppress(OSError):
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError):  # it may have ended
                if (task / "comm").read_text().strip() == _NAME:
                    yield int(task.name)


def make_way() -> None:
    """Lets these threads take nobody's place on a core when they wake up.

    While some thread holds a connection's lock, as in a send, gloo's own thread asks its sockets again and again. Where
    it was put on that thread's core, nothing happens until its time slice ends: 4 ms, in every third exchange of ranks
    that have one core each. A thread of the class SCHED_BATCH wakes up behind who runs, and has the same share of the
    core: exchanges beside a computation take about half as long (benchmarks/exchange.py).
    """
    for thread in threads():
        with contextlib.suppress(OSError, AttributeError):  # not allowed, or a system without such classes
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
