"""Live bytes, counted from the storages that exist: what proves ZeRO on any machine."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.base import private, pytree

Out = TypeVar("Out")


class LiveBytes(TorchDispatchMode):
    """Inside, counts the bytes of every storage that an operation of this thread made and that still exists.

    Storages that were resized to nothing count nothing. Every operation is looked at, which makes it slow: for tests.

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
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._resizable: set[int] = set()  # what was made empty may be resized, which no operation tells
        self._total = 0
        self.peak, self._on_change = 0, on_change

    def __torch_dispatch__(self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: Any = None) -> object:
        out = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in _plain_tensors((args, kwargs or {}))}
        for tensor in _plain_tensors(out):
            if tensor.untyped_storage()._cdata not in given:
                self._add(tensor, "empty" in func.__name__)
        for key in (*given, *self._resizable):
            self._refresh(key)
        if self._on_change is not None:
            self._on_change(self._total)
        self.peak = max(self.peak, self._total)
        return out

    def _add(self, tensor: torch.Tensor, resizable: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.device.type == "meta" or key in self._storages:
            return
        self._storages[key] = (weakref.ref(storage, lambda _: self._forget(key)), storage.nbytes())
        self._total += storage.nbytes()
        if resizable:
            self._resizable.add(key)

    def _forget(self, key: int) -> None:
        self._total -= self._storages.pop(key)[1]
        self._resizable.discard(key)

    def _refresh(self, key: int) -> None:
        if key in self._storages:
            reference, before = self._storages[key]
            storage = reference()
            now = storage.nbytes() if storage is not None else 0
            self._storages[key] = (reference, now)
            self._total += now - before

    def now(self) -> int:
        """Bytes that are alive now."""
        for key in list(self._storages):
            self._refresh(key)
        return self._total

    def reset_peak(self) -> None:
        self.peak = self.now()


def _plain_tensors(tree: object) -> list[torch.Tensor]:
    """The tensors that have a storage: a wrapper of functorch has none."""
    return [x for x in pytree.flatten(tree)[0] if isinstance(x, torch.Tensor) and not private.is_wrapped(x)]


def assert_peak_bytes(fn: Callable[[], Out], limit: int) -> Out:
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
