"""Settings of torch that a second run of an operator finds as the first did, and attention that has one value."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import ClassVar

import torch

_C = torch._C


class _Setting:
    """Inside, a setting has this value: it is set only where it differs, and put back."""

    now: ClassVar[staticmethod[..., object]]
    take: ClassVar[staticmethod[..., object]]

    def __init__(self, value: object) -> None:
        self._value = value

    def __enter__(self) -> None:
        self._before = self.now()
        if self._before != self._value:
            self.take(self._value)

    def __exit__(self, *error: object) -> None:
        if self._before != self._value:
            self.take(self._before)


class default_dtype(_Setting):
    """The process's."""

    now, take = staticmethod(torch.get_default_dtype), staticmethod(torch.set_default_dtype)


class functions_seen(_Setting):
    """Whether classes of tensors and function modes see the functions that are called, which is the thread's."""

    now = staticmethod(_C._get_torch_function_state)  # type: ignore[attr-defined]
    take = staticmethod(_C._set_torch_function_state)  # type: ignore[attr-defined]
    nowhere = staticmethod(_C.DisableTorchFunction)  # type: ignore[attr-defined]


_attention = threading.Lock()
_slow = [0, True]  # how many are inside, and whether the fast way was on before


@contextlib.contextmanager
def without_fast_attention() -> Iterator[None]:
    """Inside, `nn.MultiheadAttention` and the layers made of it compute as they do for a gradient.

    Without one torch takes another way, which puts zeros in padded places, unless somebody looks at the functions that
    it calls: one call would have two values.
    """
    fast = torch.backends.mha
    with _attention:
        if not _slow[0]:
            _slow[1] = fast.get_fastpath_enabled()
            fast.set_fastpath_enabled(False)
        _slow[0] += 1
    try:
        yield
    finally:
        with _attention:
            _slow[0] -= 1
            if not _slow[0]:
                fast.set_fastpath_enabled(_slow[1])
