"""Where a buffer is put: the host's memory or a disk (arXiv 2104.07857); and copies from there, on own streams."""

from __future__ import annotations

import collections
import functools
import threading
import warnings
from collections.abc import Callable

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
from fzero.stores.disk import Disk
from fzero.stores.file import File
from fzero.stores.folder import folder_of

MOST = 1 << 29
Copied = Callable[[], None]  # the host waits until it has passed


class _Lane:
    """One direction of one device: a stream, and the device's tensors of the copies on their way.

    They are held until these have passed, and no more than `MOST` bytes at once: the device then waits for the oldest
    one, and the host for none.
    """

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
        with private.below_transforms():  # on a level of torch.func a view has no memory of its own
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
    """Another value where a buffer lies; one that a transform goes on through stays where it is, as in `put`."""
    if not isinstance(buffer, Away) or follows(tensor):
        return tensor
    return buffer.again(tensor, opened=False, takes=False)
