"""Where a buffer is put: which memories there are, and the buffers in the host's and on a disk (arXiv 2104.07857)."""

from __future__ import annotations

import functools
import warnings

import torch

from fzero.base import private
from fzero.base.arguments import named
from fzero.base.follow import follows
from fzero.base.refusals import noting
from fzero.comm import backend
from fzero.comm.backend import Wait as Done
from fzero.comm.backend import done
from fzero.comm.hazards import in_flight
from fzero.stores.away import Away, Buffer, Wait
from fzero.stores.blocks import aligned
from fzero.stores.copies import host_memory, start_down, start_up
from fzero.stores.disk import Disk
from fzero.stores.file import File
from fzero.stores.folder import folder_of


class HostBuffer(Away):
    """A flat buffer in the host's memory, page-locked where an accelerator copies from it.

    Attributes:
        tensor: to which nobody writes but an update that takes it.
    """

    def __init__(
        self, tensor: torch.Tensor, device: torch.device, what: str, arrival: torch.Event | None = None
    ) -> None:
        super().__init__(tensor.dtype, tensor.numel(), device, what)
        self.tensor, self._arrival = tensor, arrival
        self._read = done  # waits for the latest copy from it

    @staticmethod
    def of(tensor: torch.Tensor, device: torch.device, what: str) -> HostBuffer:
        """The values of a tensor, copied to the host."""
        if device.type == "cpu":
            _warn_that_it_saves_nothing()
        own = host_memory(tensor, device)
        return HostBuffer(own, device, what, start_down(own, tensor.detach()))

    def _start_read(self, target: torch.Tensor | None) -> Wait:
        own = torch.empty_like(self.tensor, device=self.device) if target is None else target
        wait = in_flight(own, self.tensor, self._copy, late=True)
        return lambda: (wait(), own)[1]

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Done:
        arrived, self._read = start_up(target, source, self._arrival)
        return arrived

    def _start_open(self, takes: bool) -> Wait:
        return lambda: self._settled() if takes else host_memory(self.tensor, self.device).copy_(self._settled())

    def _settled(self) -> torch.Tensor:
        """Its memory, which no copy writes to or reads from any more."""
        if self._arrival is not None:
            self._arrival.synchronize()
        self._read()
        return self.tensor

    def again(self, tensor: torch.Tensor, opened: bool, takes: bool) -> HostBuffer:
        if opened:
            return HostBuffer(tensor, self.device, self.what)
        own = self._settled() if takes else host_memory(tensor, self.device)
        return HostBuffer(own, self.device, self.what, start_down(own, tensor.detach()))


@functools.cache
def _warn_that_it_saves_nothing() -> None:
    """Says once a process that there is no other memory than the host's."""
    warnings.warn(
        "fz.offload to 'host': this step computes on the CPU, whose memory is the host's, so nothing is saved; buffers "
        "are copied all the same. On this machine fz.Disk(path) saves memory.",
        stacklevel=3,
    )


class DiskBuffer(Away):
    """A flat buffer in a file, which goes when nobody refers to this any more; or is written over by the next value."""

    def __init__(self, file: File, disk: Disk, dtype: torch.dtype, numel: int, device: torch.device, what: str) -> None:
        super().__init__(dtype, numel, device, what)
        self.file, self._disk = file, disk

    @staticmethod
    def of(tensor: torch.Tensor, disk: Disk, device: torch.device, what: str, over: File | None = None) -> DiskBuffer:
        """The values of a tensor, to which nobody writes any more, on their way to a file."""
        source = tensor.detach()
        if source.device.type != "cpu":
            source = aligned(source.numel(), source.dtype).copy_(source)
        file = folder_of(disk, backend.run_id).start_write(source.contiguous(), what, disk, over)
        return DiskBuffer(file, disk, tensor.dtype, tensor.numel(), device, what)

    def tell(self) -> None:
        self.file.tell()

    def _start_read(self, target: torch.Tensor | None) -> Wait:
        if self.device.type == "cpu":
            return self._start(aligned(self.numel(), self.dtype) if target is None else target)
        wait = self._start_open(False)

        def arrived() -> torch.Tensor:
            own = wait()
            if target is None:
                return own.to(self.device)
            start_up(target, own)[0]()
            return target

        return arrived

    def _start_open(self, takes: bool) -> Wait:
        return self._start(aligned(self.numel(), self.dtype))

    def _start(self, target: torch.Tensor) -> Wait:
        wait = self.file.start_read(target)
        return lambda: (wait(), target)[1]

    def again(self, tensor: torch.Tensor, opened: bool, takes: bool) -> DiskBuffer:
        # a transfer that is on its way holds the file
        over = self.file if takes and private.entry_holders(vars(self), "file") == 0 else None
        return DiskBuffer.of(tensor, self._disk, self.device, self.what, over)


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
