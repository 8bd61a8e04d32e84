"""What the transfers of one folder share: threads, and how many bytes may wait for them."""

from __future__ import annotations

import functools
import os
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from fzero.stores.blocks import Bounce, Handle, open_file
from fzero.stores.disk import Disk

Task = Callable[[Bounce], None]
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
            self._tasks.put(functools.partial(self._run, task, times))

    def _run(self, task: Task, times: int, bounce: Bounce) -> None:
        """Runs a task and lets others run it, on a thread of its own: an interrupt would leave some of them out."""
        with self._lock:
            own = times if self.closed else 1  # what comes after the end may be taken by nobody
            for _ in range(times - own):
                self._tasks.put(task)
        for _ in range(own):
            task(bounce)

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


class Room:
    """A bound on the bytes of writes that are on their way: memory that their sources still take.

    What a write takes is its own, and goes with it at the latest, where interrupts keep anybody from giving it back.
    """

    def __init__(self) -> None:
        self._taken: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # threading's Condition may be left locked by an interrupt
        self._doors: list[threading.Lock] = []  # of those who wait

    @property
    def taken(self) -> int:
        return sum(self._taken.values())

    def take(self, owner: object, nbytes: int, bound: int) -> None:
        """Waits until there is room; more than the bound is let through alone."""
        while True:
            with self._lock:
                if not self.taken or self.taken + nbytes <= bound:
                    self._taken[owner] = nbytes
                    return
                door = threading.Lock()
                door.acquire()
                self._doors.append(door)
            with door:
                pass

    def give(self, owner: object) -> None:
        with self._lock:
            self._taken.pop(owner, None)
            doors, self._doors = self._doors, []
        for door in doors:
            door.release()


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
