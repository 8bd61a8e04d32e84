"""Ctrl-C and SIGTERM as a wish that is looked at when it suits; a second one ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
DEATH = signal.SIGCHLD  # of a child process
ONE = 1.0  # seconds within which what comes again is the same wish: a terminal and torchrun both send Ctrl-C on
SOON = 0.05  # seconds until finalizers have returned, in which Python drops what a handler raises


@dataclass(eq=False)
class Wish:
    """A signal that has come, which all loops that ran then know.

    Attributes:
        heard: whether one of these loops has ended as it asks for.
    """

    number: int
    at: float
    heard: bool = False


class Asked:
    """Between `begin` and `end` the first signal is only noted, where this is the main thread, which alone may do so.

    A later one goes to whoever handled it before, and so does every one where no loop runs any more, or in a process
    that was forked meanwhile. One that the program was told to ignore stays ignored.
    """

    def __init__(self) -> None:
        self.wish: Wish | None = None
        self._done: float | None = None  # when what is asked for was done

    def __call__(self) -> bool:
        """Whether one has come."""
        return self.wish is not None

    def begin(self) -> None:
        if threading.current_thread() is threading.main_thread():
            _handlers.add(self)

    def done(self) -> None:
        """What was asked for, here or on another rank, is done: the loop ends for it."""
        self._done = time.monotonic()

    def end(self, later: bool) -> None:
        """Signals go where they went before, and one that nothing was done about comes again.

        Where it was done, the same wish may come again for a second, from others or to other ranks: that is waited for.

        Args:
            later: whether it comes again once finalizers have returned, which would swallow an error.
        """
        wish = self.wish
        if self._done is not None and _handlers.running == [self]:
            time.sleep(max(0.0, (wish.at if wish is not None else self._done) + ONE - time.monotonic()))
        if not _handlers.remove(self) or wish is None:
            return
        wish.heard |= self._done is not None
        if not _handlers.running and not wish.heard:
            if not later:
                signal.raise_signal(wish.number)
                return
            again = threading.Timer(SOON, os.kill, (os.getpid(), wish.number))
            again.daemon = True
            with contextlib.suppress(RuntimeError):  # there are no threads any more as the interpreter ends
                again.start()


class _Handlers:
    """The loops that run in this process, which hear signals meanwhile.

    Who sends a signal to all processes of a group ends a DataLoader's workers by it, and torch's handler of their
    deaths raises wherever the program is: from the signal on it is not called, and batches fail by themselves.
    """

    def __init__(self) -> None:
        self.running: list[Asked] = []
        self._process = 0

    def add(self, asked: Asked) -> None:
        if not self.running or self._process != os.getpid():
            self._give_back()  # what loops that another thread has ended have left
            self._process = os.getpid()
            for number in SIGNALS:
                if signal.getsignal(number) not in (None, signal.SIG_IGN):
                    signal.signal(number, _Handler(number, self._hear))
        self.running.append(asked)

    def remove(self, asked: Asked) -> bool:
        """Whether a loop was still heard of; behind the last one signals go where they went before."""
        if asked not in self.running or self._process != os.getpid():
            return False
        self.running.remove(asked)
        if not self.running and threading.current_thread() is threading.main_thread():
            self._give_back()
        return True

    def _give_back(self) -> None:
        self.running = []
        for number in (*SIGNALS, DEATH):
            if isinstance(own := signal.getsignal(number), _Handler):
                signal.signal(number, own.before)

    def _hear(self, number: int) -> bool:
        """Whether a loop takes a signal as a wish."""
        now, known = time.monotonic(), [asked.wish for asked in self.running if asked.wish is not None]
        if not self.running or self._process != os.getpid() or any(now - wish.at > ONE for wish in known):
            self._give_back()
            return False
        wish = Wish(number, now)
        for asked in self.running:
            asked.wish = asked.wish or wish
        if callable(before := signal.getsignal(DEATH)) and not isinstance(before, _Handler):
            signal.signal(DEATH, _Handler(DEATH, lambda _: bool(self.running) and self._process == os.getpid()))
        return True


class _Handler:
    """Handles a signal while loops run.

    It knows who did before and passes on to him what no loop takes: somebody may keep it as what came before his own
    handler, and call it, or put it back, when no loop runs any more.
    """

    def __init__(self, number: int, takes: Callable[[int], bool]) -> None:
        self.before, self._takes = signal.getsignal(number), takes

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._takes(number):
            return
        if callable(self.before):
            self.before(number, frame)
        elif self.before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


_handlers = _Handlers()  # a process has one for each signal


def warn_of(what: str, error: str) -> None:
    """Says what was raised as a loop was to end, if anything was."""
    if error:
        warnings.warn(
            f"loop: {what} raised {error} while the loop was ending, by a signal or by stop. A signal also ends the "
            "workers of a DataLoader. The loop ends as asked.",
            RuntimeWarning,
            stacklevel=2,
        )
