"""Updates in the host's memory beside what computes: one after another, on a thread and with cores of their own."""

from __future__ import annotations

import concurrent.futures
import contextvars
import os
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from fzero.base.context import during
from fzero.kernels.build import threads

T = TypeVar("T")


def spare_cores(device: torch.device) -> int:
    """How many cores of this process's share nothing computes on.

    An accelerator leaves all but the one that tells it what to do; a CPU none, as an update takes all that torch does.
    Processes that one launcher has started on this machine share it (LOCAL_WORLD_SIZE).
    """
    if device.type == "cpu":
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) - 1)


class CpuWorker(Generic[T]):
    """One job at a time on a thread that lasts as long as this; what it raises, `wait` does."""

    def __init__(self, device: torch.device, cores: int) -> None:
        self._device, self._cores = device, cores
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "fzero-update")
        self._job: concurrent.futures.Future[T] | None = None

    def start(self, job: Callable[[], T]) -> None:
        """Begins a job, once the one before has ended and was waited for."""
        assert self._job is None
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        self._job = self._thread.submit(contextvars.copy_context().run, self._run, job, stream)

    def _run(self, job: Callable[[], T], stream: torch.cuda.Stream | None) -> T:
        """What the thread does, in order with what was asked of the device until now."""
        with torch.no_grad(), torch.cuda.stream(stream), during(threads, self._cores):
            return job()

    def wait(self) -> T | None:
        """The result of the job that runs, at its end; None where none does."""
        job, self._job = self._job, None
        return job.result() if job is not None else None

    def end(self) -> None:
        """Waits for what runs, whatever becomes of it."""
        self._thread.shutdown()
