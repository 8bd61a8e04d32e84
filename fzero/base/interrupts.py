"""What a Ctrl-C must not end in the middle."""

from __future__ import annotations

import contextlib
import signal
import threading
import types
from collections.abc import Iterator


@contextlib.contextmanager
def kept_back() -> Iterator[None]:
    """Inside, Ctrl-C waits until the end: of what must be done as a whole, such as to tell the same to several others.

    Other signals do not, nor does what a program that handles Ctrl-C in C does.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[tuple[int, types.FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: waiting.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if waiting:
            handler(*waiting[0])
