"""A disk as a store: buffers that lie in files, and are read for each use (ZeRO-Infinity, arXiv 2104.07857)."""

from __future__ import annotations

import torch

from fzero.base import private
from fzero.comm import backend
from fzero.stores.away import Away, Wait
from fzero.stores.blocks import aligned
from fzero.stores.copies import start_up
from fzero.stores.disk import Disk
from fzero.stores.file import File
from fzero.stores.folder import folder_of


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
