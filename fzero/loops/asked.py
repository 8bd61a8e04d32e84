"""Ctrl-C and SIGTERM as a wish that is looked at when it suits; a second one ends at once."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ONE = 1.0  # seconds within which what comes again is the same wish: a terminal and torchrun both send Ctrl-C on


class Asked:
    """Between `begin` and `end` the first signal is only noted, where this is the main thread, which alone may do so.

    A later one goes to whoever handled it before. One that the program was told to ignore stays ignored.

    Attributes:
        heard: whether what was asked for is done; otherwise the signal comes again at the end.
    """

    def __init__(self) -> None:
        self.heard = False
        self._first: tuple[int, float] | None = None
        self._before: dict[int, signal._HANDLER] = {}

    def __call__(self) -> bool:
        """Whether one has come."""
        return self._first is not None

    def begin(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            before = signal.getsignal(number)
            if before not in (None, signal.SIG_IGN):
                self._before[number] = before
                signal.signal(number, self._handle)

    def end(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        before, self._before = self._before, {}
        for number, handler in before.items():
            if signal.getsignal(number) == self._handle:  # nobody has put another there meanwhile
                signal.signal(number, handler)
        if before and self._first is not None and not self.heard:
            signal.raise_signal(self._first[0])

    def _handle(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = number, now
        elif now - self._first[1] > ONE:
            self.heard = True
            self.end()
            signal.raise_signal(number)
