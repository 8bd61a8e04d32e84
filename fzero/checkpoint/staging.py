"""Tensors on their way to a file: from an accelerator by slices, the next one copied while one is written."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import NamedTuple

import torch

from fzero.checkpoint import chunks
from fzero.stores.copies import host_memory

_CHUNKS = 8  # of a slice that is copied at once: of page-locked memory no more than a few are taken
_AHEAD = 2  # slices that are copied while one is written


class _Copy(NamedTuple):
    """A slice on its way; its source is held until it has passed, or that memory would be given to others."""

    host: torch.Tensor
    source: torch.Tensor
    passed: torch.Event


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory that a file can be written from."""
    return tensor.detach().cpu().contiguous()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a flat tensor on the CPU."""
    return memoryview(tensor.resolve_neg().view(torch.uint8).numpy())  # type: ignore[arg-type]


def staged(tensors: Iterator[torch.Tensor], ready: torch.Event | None) -> Iterator[torch.Tensor]:
    """Flat tensors in the host's memory; those of an accelerator arrive in page-locked memory, by a stream of its own.

    Each is let go as soon as it was copied.

    Args:
        ready: has passed on the device once it has computed all of them.
    """
    streams, copying = dict[torch.device, torch.Stream](), collections.deque[_Copy]()
    for tensor in tensors:
        if tensor.device.type == "cpu":
            yield from _arrived(copying, 0)
            yield tensor.contiguous()
            continue
        if tensor.device not in streams:
            streams[tensor.device] = torch.Stream(tensor.device)
            if ready is not None:
                streams[tensor.device].wait_event(ready)
        stream, pieces = streams[tensor.device], tensor.split(_CHUNKS * chunks.CHUNK // tensor.itemsize)
        del tensor
        for piece in pieces:
            yield from _arrived(copying, _AHEAD)
            host = host_memory(piece, piece.device)
            with stream:
                host.copy_(piece, non_blocking=True)
                copying.append(_Copy(host, piece, stream.record_event()))
    yield from _arrived(copying, 0)


def _arrived(copying: collections.deque[_Copy], most: int) -> Iterator[torch.Tensor]:
    """The slices that have arrived, oldest first, until no more than `most` are under way."""
    while len(copying) > most:
        own = copying.popleft()
        own.passed.synchronize()
        host = own.host
        del own
        yield host
