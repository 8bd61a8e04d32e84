"""The host's memory as a store: buffers that lie there, and are copied to the device for each use."""

from __future__ import annotations

import functools
import warnings

import torch

from fzero.comm.backend import Wait as Done
from fzero.comm.backend import done
from fzero.comm.hazards import in_flight
from fzero.stores.away import Away, Wait
from fzero.stores.copies import host_memory, start_down, start_up


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
