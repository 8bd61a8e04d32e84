"""Worker processes that may crash or hang: then the job is known, and another worker goes on."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Job(NamedTuple):
    """`call(*args)`, which must be picklable, and the seconds that it may take."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    seconds: float


@dataclass(frozen=True)
class Lost:
    """What comes back in a result's place: "crash", "hang", or "error:" with the traceback of the job itself."""

    why: str


class _Worker:
    def __init__(self) -> None:
        self.job: Job | None = None
        self.started = 0.0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            # not a daemon: it may have processes of its own
            self.process = context.Process(target=_work, args=(theirs, list(sys.path)))
            self.process.start()
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
        theirs.close()

    def give(self, job: Job) -> None:
        self.job, self.started = job, time.monotonic()
        self.pipe.send(job)

    def late(self) -> bool:
        return self.job is not None and time.monotonic() - self.started > self.job.seconds

    def restart(self) -> None:
        self.stop()
        self._start()

    def stop(self) -> None:
        self.pipe.close()  # its own processes end with it, as their pipes do
        self.process.kill()
        self.process.join()


def run_jobs(jobs: Iterator[Job], workers: int) -> Iterator[tuple[Job, Any]]:
    """(job, its result or `Lost`), in the order in which they are done; jobs are taken when a worker is free."""
    pool = [_Worker() for _ in range(workers)]
    try:
        for worker in pool:
            _give_next(worker, jobs)
        while any(worker.job for worker in pool):
            ready = multiprocessing.connection.wait([w.pipe for w in pool if w.job], 1.0)
            for worker in pool:
                job = worker.job
                if job is None:
                    continue
                if worker.pipe in ready:
                    try:
                        result = worker.pipe.recv()
                    except (EOFError, ConnectionError):
                        result = Lost("crash")
                        worker.restart()
                elif worker.late():
                    result = Lost("hang")
                    worker.restart()
                else:
                    continue
                worker.job = None
                yield job, result
                _give_next(worker, jobs)
    finally:
        for worker in pool:
            worker.stop()


def _give_next(worker: _Worker, jobs: Iterator[Job]) -> None:
    job = next(jobs, None)
    if job is not None:
        worker.give(job)


def _work(pipe: Any, path: list[str]) -> None:
    sys.path[:] = path
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            result = job.call(*job.args)
        except Exception:
            result = Lost("error:\n" + traceback.format_exc())
        pipe.send(result)
