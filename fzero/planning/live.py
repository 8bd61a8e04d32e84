"""Live bytes, counted from the storages that exist: what proves ZeRO on any machine, and what a plan counts."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.base import private, pytree
from fzero.base.as_written import uncompiled


@uncompiled
class LiveBytes(TorchDispatchMode):
    """A context that counts the bytes of all tensors that were made inside, on this thread, and still exist.

    It looks at every operation, which is slow: use it in tests. Storages that were resized to zero do not count.

    Attributes:
        peak: the largest number of bytes so far.

    Example:
        >>> with fz.testing.LiveBytes() as live:
        ...     x = torch.zeros(1000)
        >>> live.now()
        4000
    """

    supports_higher_order_operators = True
    counts = True  # and changes nothing of what is computed: units run as without it

    def __init__(self) -> None:
        super().__init__()
        self._storages: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: Any = None) -> object:
        out = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in _plain_tensors((args, kwargs or {}))}
        for tensor in _plain_tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and tensor.device.type != "meta":
                self._storages[storage._cdata] = storage
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        """Bytes that exist now."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def reset_peak(self) -> None:
        """Sets `peak` to the bytes that exist now."""
        self.peak = self.now()


def _plain_tensors(tree: object) -> list[torch.Tensor]:
    """The tensors that have a storage: a wrapper of functorch has none."""
    return [x for x in pytree.flatten(tree)[0] if isinstance(x, torch.Tensor) and not private.is_wrapped(x)]
