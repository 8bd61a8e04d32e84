"""Settings of torch that a second run of an operator finds as the first did: dtype, seen functions, attention."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch

_C = torch._C
# which attention scaled_dot_product_attention takes, by what reads and sets each
_ATTENTIONS = [
    (getattr(_C, name), getattr(_C, f"_set_sdp_use_{name.removeprefix('_get_').removesuffix('_sdp_enabled')}"))
    for name in dir(_C)
    if name.startswith("_get_") and name.endswith("_sdp_enabled")
]


def attentions() -> list[bool]:
    """Those that may be taken here and now (`torch.nn.attention.sdpa_kernel`); `with_attentions` takes them."""
    return [read() for read, _ in _ATTENTIONS]


@contextlib.contextmanager
def with_attentions(allowed: Sequence[bool]) -> Iterator[None]:
    """Inside, these may be taken. They are the process's, so they are set only where they differ, and put back."""
    found = attentions()
    if found == allowed:
        yield
        return
    try:
        for (_, set_), own in zip(_ATTENTIONS, allowed, strict=True):
            set_(own)
        yield
    finally:
        for (_, set_), own in zip(_ATTENTIONS, found, strict=True):
            set_(own)


class default_dtype:
    """Inside, this is the default dtype. It is the process's, so it is set only where it differs, and put back."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        if self._before != self._dtype:
            torch.set_default_dtype(self._dtype)

    def __exit__(self, *error: object) -> None:
        if self._before != self._dtype:
            torch.set_default_dtype(self._before)


class functions_seen:
    """Inside, classes of tensors and function modes see the functions that are called as they did where it was noted.

    Args:
        state: `functions_seen.now()`, there and then. It is the thread's.
    """

    now = staticmethod(_C._get_torch_function_state)  # type: ignore[attr-defined]
    nowhere = staticmethod(_C.DisableTorchFunction)  # type: ignore[attr-defined]

    def __init__(self, state: object) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._before = self.now()
        if self._before != self._state:
            _C._set_torch_function_state(self._state)  # type: ignore[attr-defined]

    def __exit__(self, *error: object) -> None:
        if self._before != self._state:
            _C._set_torch_function_state(self._before)  # type: ignore[attr-defined]


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
