"""Where a buffer is put: a memory's name, or a disk, and the buffer that lies there."""

from __future__ import annotations

import torch

from fzero.base import private
from fzero.stores.away import Away, Buffer
from fzero.stores.host import HostBuffer

Memory = str
DEVICE, HOST = "device", "host"


def name_of(memory: Memory) -> str:
    """A memory in words."""
    return memory


def put(memory: Memory, tensor: torch.Tensor, device: torch.device, what: str, shared: bool = False) -> Buffer:
    """The buffer for a tensor in a memory; the tensor is not the caller's any more.

    Args:
        device: that computes with it.
        what: words for errors, such as "moments of unit 'blocks.0'".
        shared: whether it is the caller's all the same, who may write to it.
    """
    if memory == DEVICE or tensor.is_meta or private.is_fake(tensor):  # which have no values
        return tensor
    return HostBuffer.of(tensor, device, what)


def put_again(buffer: Buffer, tensor: torch.Tensor) -> Buffer:
    """Another value where a buffer lies."""
    return buffer.again(tensor, opened=False) if isinstance(buffer, Away) else tensor
