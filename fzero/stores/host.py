"""The host's memory as a store: buffers that lie there, and are copied to the device for each use."""

from __future__ import annotations

import threading
import warnings

import torch

from fzero.comm.backend import Wait as Done
from fzero.comm.backend import done
from fzero.comm.hazards import in_flight
from fzero.stores.away import Away, Wait

_said: set[str] = set()
_once = threading.Lock()


class HostBuffer(Away):
    """A flat buffer in the host's memory, page-locked where an accelerator copies from it.

    Attributes:
        tensor: to which nobody writes but an update that takes it.
    """

    def __init__(self, tensor: torch.Tensor, device: torch.device, what: str) -> None:
        super().__init__(tensor.dtype, tensor.numel(), device, what)
        self.tensor = tensor

    @staticmethod
    def of(tensor: torch.Tensor, device: torch.device, what: str) -> HostBuffer:
        """The values of a tensor, copied to the host."""
        _warn_where_it_saves_nothing(device)
        return HostBuffer(_copied(tensor), device, what)

    def _start_read(self, target: torch.Tensor | None) -> Wait:
        own = torch.empty_like(self.tensor, device=self.device) if target is None else target
        wait = in_flight(own, self.tensor, _copy, late=True)

        def arrived() -> torch.Tensor:
            wait()
            return own

        return arrived

    def _start_open(self, takes: bool) -> Wait:
        own = self.tensor if takes else _copied(self.tensor)
        return lambda: own

    def again(self, tensor: torch.Tensor, opened: bool, takes: bool) -> HostBuffer:
        own = tensor if opened else self.tensor.copy_(tensor.detach()) if takes else _copied(tensor)
        return HostBuffer(own, self.device, self.what)


def _copy(target: torch.Tensor, source: torch.Tensor) -> Done:
    target.copy_(source, non_blocking=True)  # in the order of the device's work, which needs no wait
    return done


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=torch.cuda.is_available())
    return out.copy_(tensor.detach())


def _warn_where_it_saves_nothing(device: torch.device) -> None:
    """Says once a process that there is no other memory than the host's."""
    with _once:
        if device.type != "cpu" or "host" in _said:
            return
        _said.add("host")
    warnings.warn(
        "fz.offload to 'host': this step computes on the CPU, whose memory is the host's, so nothing is saved; buffers "
        "are copied all the same. On this machine fz.Disk(path) saves memory.",
        stacklevel=2,
    )
