"""Compiled functions as they were written, for a while: nothing is compiled for what is only tried."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

import torch

_lock = threading.Lock()
_inside: list[contextlib.ExitStack] = []  # of all threads, as torch has one stance for them


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, what torch.compile has made runs as it was written, and is compiled afterwards as if nothing had been.

    Torch would note for ever that it does not compile a function which it has first met within a dispatch mode.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        yield
        return
    with _lock:
        stack = _inside[0] if _inside else contextlib.ExitStack()
        if not _inside:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        _inside.append(stack)
    try:
        yield
    finally:
        with _lock:
            _inside.pop()
            if not _inside:
                stack.close()
