"""The price of a low-precision dtype on a CPU without instructions for it, measured once."""

from __future__ import annotations

import functools
import threading
import time
import warnings

import torch

from fzero.base import private
from fzero.state.train_state import TrainState

SLOW = 3.0  # times as long as in float32: a CPU with instructions for it takes less than once, one without 10 to 50
_said: set[torch.dtype] = set()
_once = threading.Lock()


@functools.cache
def slowdown(dtype: torch.dtype) -> float:
    """Counts how many times as long as in float32 a 256×256 matmul takes in `dtype` on this CPU."""

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


def warn_where_slow(state: TrainState) -> None:
    """Says, once a dtype and process, that a state's matrices will be computed with in a dtype that is slow here."""
    for key, group in state.params.layout.groups.items():
        dtype, buffer = group.row.policy.compute, state.params.placed(key)
        if (
            dtype not in (torch.bfloat16, torch.float16)
            or buffer.device.type != "cpu"
            or private.is_fake(buffer.parts[0])
        ):
            continue
        matrix = next((slot.path for slot in group.slots if len(slot.shape) > 1), None)
        with _once:
            if matrix is None or dtype in _said:
                continue
            _said.add(dtype)
            times = slowdown(dtype)
        if times >= SLOW:
            warnings.warn(
                f"Slow in {dtype}: this CPU has no instructions for it; a matmul takes {times:.0f} times as long as in "
                f"float32, and this step computes so with {matrix!r}. Leave fz.autocast out, or say "
                "compute=torch.float32 in the policy.",
                stacklevel=3,
            )
