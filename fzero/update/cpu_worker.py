"""Updates in the host's memory beside what computes: one after another, on a thread and with cores of their own."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

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


def begun(thread: Executor, job: Callable[[], T], device: torch.device, cores: int) -> Future[T]:
    """A job that begins on a thread, with cores of its own, after what was asked of the device until now."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run() -> T:
        with torch.no_grad(), torch.cuda.stream(stream), during(threads, cores):
            return job()

    return thread.submit(contextvars.copy_context().run, run)
