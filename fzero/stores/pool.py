"""What the transfers of one folder share: threads, and how many bytes may wait for them."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from fzero.stores.blocks import Handle, open_file
from fzero.stores.disk import Disk

Task = Callable[[], None]
_LAST_CHUNK = 30.0  # seconds that a chunk which is on its way at the end may take


class Pool:
    """Threads that run tasks in the order of their coming.

    They are daemons, as threads that are not are waited for before anybody can tell them to end.
    """

    def __init__(self) -> None:
        self.closed = False
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, task: Task, times: int) -> None:
        """Lets so many threads run a task; more are started where there are fewer.

        Raises:
            RuntimeError: they have ended, or none can be started.
        """
        with self._lock:
            if self.closed:
                raise RuntimeError("the folder's threads have ended, as the interpreter does")
            while len(self._threads) < times:
                thread = threading.Thread(target=_work, args=(self._tasks,), name="fzero-disk", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads: those that there are do it all
                    if not self._threads:
                        raise
                    break
                self._threads.append(thread)
            for _ in range(times):
                self._tasks.put(task)

    def close(self) -> None:
        """Ends the threads, from outside of them; tasks that have not run yet see `closed`, and end early."""
        with self._lock:
            self.closed = True
            for _ in self._threads:
                self._tasks.put(None)
        for thread in self._threads:
            thread.join(_LAST_CHUNK)

    def runs_here(self) -> bool:
        """Whether this is one of its threads."""
        return threading.current_thread() in self._threads


def _work(tasks: queue.SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # or what it holds would live until the next one comes


class Room:
    """A bound on the bytes of writes that are on their way: memory that their sources still take."""

    def __init__(self) -> None:
        self.taken, self._changed = 0, threading.Condition()

    def take(self, nbytes: int, bound: int) -> None:
        """Waits until there is room; more than the bound is let through alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self.taken or self.taken + nbytes <= bound)
            self.taken += nbytes

    def give(self, nbytes: int) -> None:
        with self._changed:
            self.taken -= nbytes
            self._changed.notify_all()


@dataclass(frozen=True)
class Shared:
    """What the transfers of one folder share. It does not hold the folder, which may end while they run.

    Attributes:
        direct: whether its filesystem takes O_DIRECT.
        failing: set since a failed write was told of, while none has gone well.
    """

    path: str
    direct: bool
    pid: int = field(default_factory=os.getpid)
    pool: Pool = field(default_factory=Pool)
    room: Room = field(default_factory=Room)
    failing: threading.Event = field(default_factory=threading.Event)

    def open(self, path: str, flags: int, disk: Disk) -> Handle:
        return open_file(path, flags, disk.direct, self.direct)

    def need_own_process(self) -> None:
        """Raises RuntimeError in a child that was forked: the threads are not there, nor are the files its own."""
        if os.getpid() != self.pid:
            raise RuntimeError(
                f"State in {self.path} belongs to process {self.pid}, and this one ({os.getpid()}) was forked from "
                "it. Use the state where it was made, or start the process by another method "
                "(multiprocessing.get_context('spawn'))."
            )
