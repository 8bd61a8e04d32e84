"""Ctrl-C and SIGTERM as a wish that is looked at when it suits; a second one ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
DEATH = signal.SIGCHLD  # of a child process
ONE = 1.0  # seconds within which what comes again is the same wish: a terminal and torchrun both send Ctrl-C on
SOON = 0.05  # seconds until finalizers have returned, in which Python drops what a handler raises
Handler = Callable[[int, FrameType | None], object] | int | None


class Asked:
    """One for all loops that run at once: the first signal is only noted, and each ends when it looks at that.

    Signals are handled in the main thread alone. A later one goes to whoever handled it before, and so does every one
    when the last loop has ended, or in a process that was forked meanwhile: somebody may keep this as what came before
    his own handler. One that the program was told to ignore stays ignored.

    Who sends a signal to all processes of a group ends a DataLoader's workers by it, and torch's handler of their
    deaths raises wherever the program is: from the signal on it is not called, and batches fail by themselves.
    """

    def __init__(self) -> None:
        self._number, self._at = 0, 0.0  # the signal that has come, and when
        self._done: float | None = None  # when a loop has ended for it, or for one of another rank
        self._loops = 0
        self._process = 0  # where it listens
        self._before: dict[int, Handler] = {}

    def __call__(self) -> bool:
        """Whether one has come."""
        return self._number != 0

    @staticmethod
    def begun() -> Asked:
        """The one of the loops that run already, or a new one that listens, for one loop more."""
        main = threading.current_thread() is threading.main_thread()
        known = [getattr(signal.getsignal(number), "__self__", None) for number in SIGNALS if main]
        own = next((each for each in known if isinstance(each, Asked) and each._listens), None)
        if own is None:
            own = Asked()
            if main:
                own._listen()
        own._loops += 1
        return own

    @property
    def _listens(self) -> bool:
        return self._process == os.getpid()

    def _listen(self) -> None:
        self._process = os.getpid()
        for number in SIGNALS:
            before = signal.getsignal(number)
            while isinstance(old := getattr(before, "__self__", None), Asked):  # whose loops another thread has ended
                before = old._before.get(number)
            if before not in (None, signal.SIG_IGN):
                self._before[number] = before
                signal.signal(number, self._hear)

    def done(self) -> None:
        """What was asked for, here or on another rank, is done: a loop ends for it."""
        self._done = time.monotonic()

    def end(self, later: bool) -> None:
        """One loop less. Behind the last, signals go where they went, and one that none has ended for comes again.

        Where one has, the same wish may come again for a second, from others or to other ranks: that is waited for.

        Args:
            later: whether it comes again once finalizers have returned, which would swallow an error.
        """
        self._loops -= 1
        if self._loops:
            return
        if self._done is not None and self._listens:
            time.sleep(max(0.0, (self._at or self._done) + ONE - time.monotonic()))
        listened, self._process = self._listens, 0
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                if signal.getsignal(number) == self._hear:
                    signal.signal(number, before)
        if not self._number or self._done is not None or not listened:
            return
        if not later:
            signal.raise_signal(self._number)
            return
        again = threading.Timer(SOON, os.kill, (os.getpid(), self._number))
        again.daemon = True
        with contextlib.suppress(RuntimeError):  # there are no threads any more as the interpreter ends
            again.start()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        before, now = self._before.get(number), time.monotonic()
        if number == DEATH and self._listens:
            return
        if self._listens and (not self._number or now - self._at <= ONE):
            self._number, self._at = self._number or number, self._at or now
            if callable(signal.getsignal(DEATH)) and DEATH not in self._before:
                self._before[DEATH] = signal.signal(DEATH, self._hear)
            return
        self._process = 0  # whoever handled it before hears of it
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def warn_of(what: str, error: str) -> None:
    """Says what was raised as a loop was to end, if anything was."""
    if error:
        warnings.warn(
            f"loop: {what} raised {error} while the loop was ending, by a signal or by stop. A signal also ends the "
            "workers of a DataLoader. The loop ends as asked.",
            RuntimeWarning,
            stacklevel=2,
        )
