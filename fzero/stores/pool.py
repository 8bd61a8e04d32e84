"""The threads of one folder, and how many bytes may wait for them."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable

from fzero.stores.blocks import Bounce

Task = Callable[[Bounce], None]
_ENDED = "the folder's threads have ended, as the interpreter does"
_LAST_CHUNK = 30.0  # seconds that a chunk which is on its way at the end may take


class Pool:
    """Threads that run tasks in the order of their coming, each with a bounce buffer of its own.

    They are daemons, as threads that are not are waited for before anybody can tell them to end.
    """

    def __init__(self) -> None:
        self.closed = False
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, task: Task, threads: int) -> None:
        """Lets a thread run a task; more threads are started where there are fewer than it will want."""
        with self._lock:
            if self.closed:
                raise RuntimeError(_ENDED)
            while len(self._threads) < threads:
                thread = threading.Thread(target=_work, args=(self._tasks,), name="fzero-disk", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads: those that there are do it all
                    if not self._threads:
                        raise
                    break
                self._threads.append(thread)
        self.put(task)

    def put(self, task: Task) -> None:
        """Lets one more thread run a task, once one is free.

        Raises:
            RuntimeError: they have ended.
        """
        with self._lock:
            if self.closed:
                raise RuntimeError(_ENDED)
            self._tasks.put(task)

    def close(self) -> None:
        """Ends the threads, from outside of them; tasks that have not run yet see `closed`, and end early."""
        with self._lock:
            self.closed = True
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(_LAST_CHUNK)

    def runs_here(self) -> bool:
        """Whether this is one of its threads."""
        return threading.current_thread() in self._threads


def _work(tasks: queue.SimpleQueue[Task | None]) -> None:
    bounce = Bounce()
    while (task := tasks.get()) is not None:
        task(bounce)
        del task  # or what it holds would live until the next one comes
    tasks.put(None)  # for the next thread: also for one that an interrupt has kept from being noted


class Latch:
    """A door that opens once. threading's Event stands on code that an interrupt may leave with its lock taken."""

    def __init__(self) -> None:
        self._door, self.is_open, self._process = threading.Lock(), False, os.getpid()
        self._door.acquire()

    def open(self) -> None:
        """Lets all through who wait, and who come later."""
        if not self.is_open:
            self.is_open = True
            self._door.release()

    def wait(self) -> None:
        while not self.is_open:
            if self._process != os.getpid():
                raise RuntimeError(
                    f"Process {os.getpid()} was forked from process {self._process} while that read or wrote state "
                    "on a disk, and lacks its threads. Use that state in the process that has made it, or fork "
                    "between steps."
                )
            with self._door:  # nothing comes between the taking of such a lock and its giving back
                pass


class Room:
    """A bound on the bytes of writes that are on their way: memory that their sources still take.

    What a write takes is its own, and goes with it at the latest, where interrupts keep anybody from giving it back.
    """

    def __init__(self) -> None:
        self._taken: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._waiting: list[Latch] = []

    @property
    def taken(self) -> int:
        return sum(self._taken.values())

    def take(self, owner: object, nbytes: int, bound: int) -> None:
        """Waits until there is room; more than the bound is let through alone."""
        while True:
            with self._lock:
                taken = self.taken
                if not taken or taken + nbytes <= bound:
                    self._taken[owner] = nbytes
                    return
                latch = Latch()
                self._waiting.append(latch)
            latch.wait()

    def give(self, owner: object) -> None:
        with self._lock:
            self._taken.pop(owner, None)
            waiting, self._waiting = self._waiting, []
        for latch in waiting:
            latch.open()
