"""What a second run of an operator finds around it as the first did, and attention that has one value."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import ClassVar

import torch

from fzero.base.context import averaged, during

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


class Ambient:
    """What decides what a function computes besides its arguments, as it was when this was made.

    Autocast, the default dtype, which other threads may set meanwhile, the axes that are averaged over, and whether
    functions are seen: a node is applied unseen by the classes of its operands, and what it runs is not.
    """

    def __init__(self, device: str) -> None:
        self.device, self.averaged = device, averaged.get()
        self.autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        self.default_dtype, self.functions = torch.get_default_dtype(), functions_seen.now()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, all is as it was."""
        enabled, dtype = self.autocast
        casts = contextlib.nullcontext()
        if enabled or torch.is_autocast_enabled(self.device):
            casts = torch.autocast(self.device, dtype=dtype, enabled=enabled, cache_enabled=False)
        with (
            functions_seen(self.functions),
            default_dtype(self.default_dtype),
            during(averaged, self.averaged),
            casts,
        ):
            yield


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
