"""What signals do: a job that a shell starts in the background ignores Ctrl-C, and so does all that it starts."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def as_in_a_terminal() -> Iterator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt and SIGTERM ends the process, here and in processes that are started."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
