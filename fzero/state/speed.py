"""The price of a low-precision dtype on a CPU without instructions for it, measured once."""

from __future__ import annotations

import functools
import threading
import time

import torch

SLOW = 3.0  # times as long as in float32: a CPU with instructions for it takes less than once, one without 10 to 50
_once = threading.Lock()  # ranks may be threads, which would disturb each other's measurement


def slowdown(dtype: torch.dtype) -> float:
    """Counts how many times as long as in float32 a 256×256 matmul takes in `dtype` on this CPU."""
    with _once:
        return _measured(dtype)


@functools.cache
def _measured(dtype: torch.dtype) -> float:
    def seconds(dtype: torch.dtype) -> float:
        x = torch.ones(256, 256, dtype=dtype, device="cpu")
        best, end = float("inf"), time.thread_time() + 0.03
        while (started := time.thread_time()) < end:  # the first one also loads the kernel
            torch.mm(x, x)
            best = min(best, time.thread_time() - started)
        return best

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that this thread's own time is what it takes, whatever else the CPU does
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return seconds(dtype) / seconds(torch.float32)
    finally:
        torch.set_num_threads(threads)
