"""Copies between the host's memory and a device's, on streams of their own, so that the device computes meanwhile.

What a copy reads or writes on the device is held until it has passed, and no more than `MOST` bytes at once: the device
then waits for the oldest one, and the host for none.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable

import torch

from fzero.base import private
from fzero.comm.backend import done

MOST = 1 << 29
Copied = Callable[[], None]  # the host waits until it has passed


class _Lane:
    """One direction of one device: a stream, and the device's tensors of the copies on their way."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.Stream(device)
        self._passing: collections.deque[tuple[torch.Tensor, torch.Event, torch.Stream]] = collections.deque()
        self._nbytes = 0
        self._lock = threading.Lock()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: torch.Event | None) -> torch.Event:
        """Starts a copy behind what the device was told before, and behind an event of the other lane."""
        here = target if target.device == self._device else source
        current = torch.accelerator.current_stream(self._device)
        with self._lock:
            while self._passing and (self._nbytes > MOST or self._passing[0][1].query()):
                tensor, event, owner = self._passing.popleft()
                self._nbytes -= tensor.nbytes
                for stream in (owner, current):  # or its memory might be given to work that does not
                    stream.wait_event(event)
            self._stream.wait_stream(current)
            if after is not None:
                self._stream.wait_event(after)
            with self._stream:
                target.copy_(source, non_blocking=True)
                event = self._stream.record_event()
            self._passing.append((here, event, current))
            self._nbytes += here.nbytes
        return event


@functools.cache
def _lanes(device: torch.device) -> tuple[_Lane, _Lane]:
    """Up to the device, and down from it."""
    return _Lane(device), _Lane(device)


def start_up(target: torch.Tensor, source: torch.Tensor, after: torch.Event | None = None) -> tuple[Copied, Copied]:
    """Copies from the host to the device. Two waits: of the device's work that is told later, and of the host."""
    with torch.no_grad(), private.preserve_version([target]):  # a graph may hold it, for the same values
        if target.device.type == "cpu":
            target.copy_(source)
            return done, done
        event = _lanes(target.device)[0].copy(target, source, after)
    return lambda: torch.accelerator.current_stream(target.device).wait_event(event), event.synchronize


def start_down(target: torch.Tensor, source: torch.Tensor) -> torch.Event | None:
    """Copies from the device to the host, where it has arrived when the event has passed; None where it has already."""
    if source.device.type == "cpu":
        target.copy_(source)
        return None
    return _lanes(source.device)[1].copy(target, source, None)


def host_memory(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory of the host for a tensor; page-locked where an accelerator copies from it and to it."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=device.type != "cpu")
