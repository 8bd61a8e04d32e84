"""Live bytes, counted from the storages that exist: what proves ZeRO on any machine."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fzero import _private, _tree


class LiveBytes(TorchDispatchMode):
    """Inside, counts the bytes of every storage that an operation of this thread made and that still exists.

    Storages that were resized to nothing count nothing. A look after every operation makes it slow: for tests.

    Attributes:
        peak: the largest sum seen, bytes.

    Example:
        >>> with fz.testing.LiveBytes() as live:
        ...     x = torch.zeros(1000)
        >>> live.now()
        4000
    """

    def __init__(self, on_change: Callable[[int], None] | None = None) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[Any]] = {}
        self.peak, self._on_change = 0, on_change

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage()._cdata
            for leaf in _tree.flatten((args, kwargs or {}))[0]
            if isinstance(leaf, torch.Tensor) and not _private.is_wrapped(leaf)
        }
        for leaf in _tree.flatten(out)[0]:
            plain = isinstance(leaf, torch.Tensor) and not _private.is_wrapped(leaf)  # a wrapper has no storage
            if plain and leaf.untyped_storage()._cdata not in given:
                self._add(leaf)
        now = self.now()
        if self._on_change is not None:
            self._on_change(now)
        self.peak = max(self.peak, now)
        return out

    def _add(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is None or known() is None:
            self._storages[storage._cdata] = weakref.ref(storage)

    def now(self) -> int:
        """Bytes that are alive now."""
        total = 0
        for key, reference in list(self._storages.items()):
            storage = reference()
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total

    def reset_peak(self) -> None:
        self.peak = self.now()


def assert_peak_bytes(fn: Callable[[], Any], limit: int) -> Any:
    """Calls `fn()`, checks that what it allocates never exceeds `limit` bytes at once, and returns the result.

    Example:
        >>> fz.testing.assert_peak_bytes(lambda: torch.zeros(10), 40).shape
        torch.Size([10])
    """
    with LiveBytes() as live:
        out = fn()
    if live.peak > limit:
        raise AssertionError(f"peak of {live.peak:,} bytes, expected at most {limit:,}")
    return out
