"""Ctrl-C and SIGTERM as a wish that is looked at when it suits; a second one ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
DEATH = signal.SIGCHLD  # of a child process
ONE = 1.0  # seconds within which what comes again is the same wish: a terminal and torchrun both send Ctrl-C on
SOON = 0.05  # seconds until finalizers have returned, in which Python drops what a handler raises
Handler = Callable[[int, FrameType | None], object] | int | None


@dataclass(eq=False)
class Wish:
    """A signal that has come, and the loops that ran then: whether one of them has ended as it asks for."""

    number: int
    at: float
    loops: Sequence[Asked]
    heard: bool = False


class Asked:
    """Between `begin` and `end` the first signal is only noted, where this is the main thread, which alone may do so.

    A later one goes to whoever handled it before, and so does every one when the loop has ended, or in a process that
    was forked meanwhile: somebody may keep this as what came before his own handler. One that the program was told to
    ignore stays ignored.

    Who sends a signal to all processes of a group ends a DataLoader's workers by it, and torch's handler of their
    deaths raises wherever the program is: from the signal on it is not called, and batches fail by themselves.
    """

    def __init__(self) -> None:
        self.wish: Wish | None = None
        self._done: float | None = None  # when what is asked for was done
        self._process = 0  # where it listens
        self._before: dict[int, Handler] = {}

    def __call__(self) -> bool:
        """Whether one has come."""
        return self.wish is not None

    @property
    def _listens(self) -> bool:
        return self._process == os.getpid()

    def begin(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._process = os.getpid()
            for number in SIGNALS:
                if signal.getsignal(number) not in (None, signal.SIG_IGN):
                    self._before[number] = signal.signal(number, self._hear)

    def done(self) -> None:
        """What was asked for, here or on another rank, is done: the loop ends for it."""
        self._done = time.monotonic()

    def end(self, later: bool) -> None:
        """Signals go where they went before, and one that nothing was done about comes again.

        Where it was done, the same wish may come again for a second, from others or to other ranks: that is waited for.

        Args:
            later: whether it comes again once finalizers have returned, which would swallow an error.
        """
        wish, listened = self.wish, self._listens
        if self._done is not None and listened:
            time.sleep(max(0.0, (wish.at if wish is not None else self._done) + ONE - time.monotonic()))
        self._process = 0
        if threading.current_thread() is threading.main_thread():
            for number in self._before:
                if signal.getsignal(number) == self._hear:
                    loops, before = self._around(number)
                    signal.signal(number, loops[0]._hear if loops else before)
        if wish is None or not listened:
            return
        wish.heard |= self._done is not None
        if wish.heard or any(loop._listens for loop in wish.loops):
            return
        if not later:
            signal.raise_signal(wish.number)
            return
        again = threading.Timer(SOON, os.kill, (os.getpid(), wish.number))
        again.daemon = True
        with contextlib.suppress(RuntimeError):  # there are no threads any more as the interpreter ends
            again.start()

    def _around(self, number: int) -> tuple[list[Asked], Handler]:
        """This loop and those around it, as far as they listen; and who handled a signal before all of them."""
        loops, handler = list[Asked](), self._before.get(number)
        if self._listens:
            loops.append(self)
        while isinstance(loop := getattr(handler, "__self__", None), Asked):
            if loop._listens:
                loops.append(loop)
            handler = loop._before.get(number)
        return loops, handler

    def _hear(self, number: int, frame: FrameType | None) -> None:
        (loops, before), now = self._around(number), time.monotonic()
        if number == DEATH and loops:
            return
        if loops and all(loop.wish is None or now - loop.wish.at <= ONE for loop in loops):
            wish, last = Wish(number, now, loops), loops[-1]
            for loop in loops:
                loop.wish = loop.wish or wish
            if callable(signal.getsignal(DEATH)) and DEATH not in last._before:
                last._before[DEATH] = signal.signal(DEATH, last._hear)
            return
        for loop in loops:
            loop._process = 0  # whoever handled it before has heard of it
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
