"""What keeps a rank's threads apart on a GPU, where each may use a stream of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from fzero.base import pytree


def device_of(params: object) -> torch.device:
    """Where a rank computes: the device of the params that it was given, which its inputs are brought to."""
    found = (leaf.device for leaf in pytree.leaves(params) if isinstance(leaf, torch.Tensor))
    return next(found, torch.device("cpu"))


class Bringing:
    """Brings operands: to a GPU by a stream of its own, beside what computes. They are there at the end."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def to(self, device: torch.device) -> Iterator[None]:
        if device.type != "cuda":
            yield
            return
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()


def used_here(tree: object) -> None:
    """Has the memory of tensors that another stream has brought kept until this thread's stream has used them."""
    for x in pytree.leaves(tree):
        if isinstance(x, torch.Tensor) and x.is_cuda:
            x.record_stream(torch.cuda.current_stream(x.device))


def made_here(tensors: Iterable[torch.Tensor]) -> dict[torch.device, torch.Event]:
    """For each GPU that tensors lie on an event: from then on they have their values."""
    found: dict[torch.device, torch.Event] = {}
    for x in tensors:
        if x.is_cuda and x.device not in found:
            found[x.device] = torch.cuda.current_stream(x.device).record_event()
    return found


def wait_for(tensor: torch.Tensor, events: dict[torch.device, torch.Event]) -> None:
    """Has this thread's stream wait until a tensor has its values, and its memory kept until the stream has read it."""
    if tensor.is_cuda:
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(events[tensor.device])
        tensor.record_stream(stream)
