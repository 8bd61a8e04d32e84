"""examples/train_lm.py in processes that are forked from one that has imported it, so that a run begins at once.

They are processes like any others: a launcher in a session of its own and its ranks, which a signal can reach one by
one. A rank says in a pipe that it has begun, and that it stands still inside a save where it was told to.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import multiprocessing.util
import os
import select
import signal
import sys
import threading
import time
import traceback
import types
from pathlib import Path
from typing import Any, NamedTuple

import torch.multiprocessing as mp
from processes import EXAMPLES

from fzero.checkpoint import files

sys.path.insert(0, str(EXAMPLES))
import launch
import train_lm

OPERATIONS = ("create", "write", "sync", "sync_folder", "rename")  # of a save, in files.py
ADOPT = 36  # PR_SET_CHILD_SUBREAPER: whoever outlives its parent becomes a child of this process


class Still(NamedTuple):
    """Where a rank stands still: before its n-th operation on the disk; a write has then got there by half."""

    rank: int
    operation: int


class Run:
    """A run under way.

    Attributes:
        pid: of the launcher, and of the session that all of its processes are in.
        ranks: the pids of those that have begun.
        still: whether a rank stands still inside a save.
    """

    def __init__(self, options: list[str], log: Path, still: Still | None = None) -> None:
        self.log, self.ranks, self.still, self.status = log, dict[int, int](), False, None
        self._said, theirs = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._said)
            _launch(options, log, still, theirs)
        os.close(theirs)

    def look(self, seconds: float) -> None:
        """Waits until something is said, at most so long."""
        if not select.select([self._said], [], [], seconds)[0]:
            return
        said = os.read(self._said, 1 << 16).decode()
        if not said:
            time.sleep(seconds)  # all have ended
        for line in said.splitlines():
            what, rank, pid = line.split()
            self.still |= what == "still"
            self.ranks[int(rank)] = int(pid)

    def over(self) -> bool:
        """Whether all of its processes have ended; they are reaped."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self.pid:
                    self.status = os.waitstatus_to_exitcode(found[1])
        return self.status is not None and not self.processes()

    def processes(self) -> list[str]:
        """The command lines of all that is left of it."""
        found = []
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if os.getsid(int(path.name)) == self.pid:
                    found.append(path.joinpath("cmdline").read_text().replace("\0", " ") or f"zombie {path.name}")
        return found

    def send(self, number: int, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """Ends what is left of it."""
        os.close(self._said)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def semaphores(self) -> list[str]:
        return [path.name for path in Path("/dev/shm").glob(f"sem.run-{self.pid}-*")]


def adopt() -> None:
    """From now on this process reaps whom a killed launcher has left, and has imported and read what every run does."""
    assert ctypes.CDLL(None).prctl(ADOPT, 1, 0, 0, 0) == 0
    launch.LINGER = 6.0
    importlib.import_module("torch._dynamo")
    importlib.import_module("matplotlib.pyplot")
    train_lm.standard_library = functools.cache(train_lm.standard_library)
    train_lm.standard_library()


def _launch(options: list[str], log: Path, still: Still | None, say: int) -> None:
    """The launcher: the example's own, but that its ranks are forked."""
    status = 1
    try:
        os.setsid()
        log.unlink(missing_ok=True)
        for number in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), number)
        multiprocessing.current_process()._config["semprefix"] = f"/run-{os.getpid()}"  # type: ignore[attr-defined]
        spawn = functools.partial(mp.start_processes, start_method="fork")
        launch.mp = types.SimpleNamespace(**{**vars(mp), "spawn": spawn})  # type: ignore[assignment]
        status = launch.launch(functools.partial(_train, still, say), train_lm.options(options))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _train(still: Still | None, say: int, rank: int, *given: Any) -> None:
    tell = lambda what: os.write(say, f"{what} {rank} {os.getpid()}\n".encode())
    if still is not None and still.rank == rank:
        _stand_still(still.operation, lambda: tell("still"))
    tell("begun")
    train_lm.train(rank, *given)


def _stand_still(operation: int, tell: Any) -> None:
    lock, count = threading.Lock(), [0]

    def counted(name: str, real: Any) -> Any:
        def call(*args: Any) -> Any:
            with lock:
                count[0] += 1
                here = count[0] == operation
            if here:
                if name == "write":
                    descriptor, data, offset = args
                    os.pwrite(descriptor, data[: len(data) // 2], offset)
                tell()
                time.sleep(600)
            return real(*args)

        return call

    for owner, name in (*[(files, name) for name in OPERATIONS], (files.Folder, "remove")):
        setattr(owner, name, counted(name, getattr(owner, name)))
