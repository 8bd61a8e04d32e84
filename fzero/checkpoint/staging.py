"""Tensors on their way to a file: those of an accelerator come to the host's memory piece by piece."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fzero.checkpoint import chunks

_CHUNKS = 8  # of a tensor that are copied at once


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory that a file can be written from."""
    return tensor.detach().cpu().contiguous()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a flat tensor on the CPU."""
    return memoryview(tensor.resolve_neg().view(torch.uint8).numpy())  # type: ignore[arg-type]


def staged(tensors: Iterator[torch.Tensor], ready: torch.Event | None) -> Iterator[torch.Tensor]:
    """Flat tensors in the host's memory; those of an accelerator are copied on a stream that no step waits for.

    Each is let go as soon as it was copied.

    Args:
        ready: has passed on the device once it has computed all of them.
    """
    for tensor in tensors:
        if tensor.device.type == "cpu":
            yield tensor.contiguous()
            continue
        stream = torch.Stream(tensor.device)
        if ready is not None:
            stream.wait_event(ready)
        for piece in tensor.split(_CHUNKS * chunks.CHUNK // tensor.itemsize):
            with stream:
                host = piece.cpu()  # waits for the copy
            yield host
