"""Where a buffer is put: the memories that there are, and the buffer that lies in one."""

from __future__ import annotations

import torch

from fzero.base import private
from fzero.base.arguments import named
from fzero.base.follow import follows
from fzero.base.refusals import noting
from fzero.stores.away import Away, Buffer
from fzero.stores.disk import Disk
from fzero.stores.host import HostBuffer
from fzero.stores.on_disk import DiskBuffer

Memory = str | Disk  # one of the names, or a disk
DEVICE, HOST = "device", "host"


def need_memory(memory: object, who: str, argument: str) -> Memory:
    """A memory that state may be offloaded to."""
    if isinstance(memory, Disk) or (isinstance(memory, str) and memory == HOST):
        return memory
    raise ValueError(f"{who}({argument}=...): got {named(memory)}, expected 'host', an fz.Disk(path) or None.")


def name_of(memory: Memory) -> str:
    """A memory in a word: which folder a rank has is its own matter."""
    return "disk" if isinstance(memory, Disk) else memory


def put(memory: Memory, tensor: torch.Tensor, device: torch.device, what: str, shared: bool = False) -> Buffer:
    """The buffer for a tensor in a memory; the tensor is not the caller's any more.

    Args:
        device: that computes with it.
        what: words for errors, such as "moments of unit 'blocks.0'".
        shared: whether it is the caller's all the same, who may write to it.
    """
    # those of the last two have no values, and of the first nobody but its transform knows how to copy it
    if memory == DEVICE or follows(tensor) or tensor.is_meta or private.is_fake(tensor):
        return tensor
    with noting():
        if isinstance(memory, Disk):
            return DiskBuffer.of(tensor.clone() if shared else tensor, memory, device, what)
        return HostBuffer.of(tensor, device, what)


def put_again(buffer: Buffer, tensor: torch.Tensor) -> Buffer:
    """Another value where a buffer lies."""
    return buffer.again(tensor, opened=False, takes=False) if isinstance(buffer, Away) else tensor
