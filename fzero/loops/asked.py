"""Ctrl-C and SIGTERM as a wish that is looked at when it suits; a second one ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
DEATH = signal.SIGCHLD  # of a child process
ONE = 1.0  # seconds within which what comes again is the same wish: a terminal and torchrun both send Ctrl-C on


@dataclass(eq=False)
class Wish:
    """A signal that has come, which all loops around each other know.

    Attributes:
        heard: whether the outermost of these loops has ended as it asks for.
    """

    number: int
    at: float
    heard: bool = False


class Asked:
    """Between `begin` and `end` the first signal is only noted, where this is the main thread, which alone may do so.

    A later one goes to whoever handled it before, and so does every one where this has ended, or in a process that was
    forked meanwhile. One that the program was told to ignore stays ignored. A loop around this one hears the first
    signal, too. Each knows who comes after it, so that one may end before those that have begun later.

    Who sends it to all processes of a group ends a DataLoader's workers by it, and torch's handler of their deaths
    raises wherever the program is: from the signal on it is called where batches are taken, in no step and no save.
    """

    def __init__(self) -> None:
        self._wish: Wish | None = None
        self._done: float | None = None  # when what is asked for was done
        self._before: dict[int, signal._HANDLER] = {}
        self._process = 0  # in which signals are noted
        self._takes = False  # whether a batch is being taken

    def __call__(self) -> bool:
        """Whether one has come."""
        return self._wish is not None

    def begin(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._process = os.getpid()
        for number in SIGNALS:
            before = signal.getsignal(number)
            while (own := _asked(before)) is not None and not own._notes:
                before = own._before[number]  # which another thread has let go
            if before not in (None, signal.SIG_IGN):
                self._before[number] = before
                signal.signal(number, self._handle)

    def taking(self, batches: Callable[[int], object]) -> Callable[[int], object]:
        """The same batches, within which deaths of workers raise as ever."""

        def taken(number: int) -> object:
            self._takes = True
            try:
                return batches(number)
            finally:
                self._takes = False

        return taken

    def done(self) -> None:
        """What was asked for, here or on another rank, is done: the loop ends for it."""
        self._done = time.monotonic()

    def end(self, later: bool) -> None:
        """Signals go where they went before, and one that nothing was done about comes again.

        Where it was done, the same wish may come again for a second, from others or to other ranks: that is waited for.

        Args:
            later: whether it comes again once finalizers have returned, which would swallow an error.
        """
        notes, wish = self._notes, self._wish
        outer = any(self._outer(number) for number in self._before)
        if notes and self._before and self._done is not None and not outer:
            time.sleep(max(0.0, (wish.at if wish is not None else self._done) + ONE - time.monotonic()))
        self._leave()
        if not notes or wish is None or outer:
            return
        wish.heard |= self._done is not None
        if not wish.heard:
            _again(wish.number, later)

    @property
    def _notes(self) -> bool:
        return self._process == os.getpid()

    def _leave(self) -> None:
        self._process = 0
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            above, handler = None, signal.getsignal(number)
            while (own := _asked(handler)) is not None and own is not self:
                above, handler = own, own._before[number]
            if own is self and above is not None:
                above._before[number] = before
            elif own is self:
                signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._hear(Wish(number, time.monotonic()), frame)

    def _hear(self, wish: Wish, frame: FrameType | None) -> None:
        before = self._before[wish.number]
        if not self._notes or (self._wish is not None and wish.at - self._wish.at > ONE):
            self._leave()
            _passed(before, wish, frame)
            return
        if (outer := self._outer(wish.number)) is not None:
            outer._hear(wish, frame)
        self._wish = self._wish or wish
        before = signal.getsignal(DEATH)
        if callable(before) and DEATH not in self._before:
            self._before[DEATH] = before
            signal.signal(DEATH, self._died)

    def _died(self, number: int, frame: FrameType | None) -> None:
        if self._takes or not self._notes:
            before = self._before[number]
            while (own := _asked(before)) is not None:
                before = own._before[number]
            if callable(before):
                before(number, frame)

    def _outer(self, number: int) -> Asked | None:
        """The loop around this one, which hears a signal, too."""
        own = _asked(self._before[number])
        return own if own is None or own._notes else own._outer(number)


def warn_of(what: str, error: str) -> None:
    """Says what was raised as a loop was to end, if anything was."""
    if error:
        warnings.warn(
            f"loop: {what} raised {error} while the loop was ending, by a signal or by stop. A signal also ends the "
            "workers of a DataLoader. The loop ends as asked.",
            RuntimeWarning,
            stacklevel=2,
        )


def _asked(handler: signal._HANDLER) -> Asked | None:
    """Whose handler it is."""
    own = getattr(handler, "__self__", None)
    return own if isinstance(own, Asked) else None


def _passed(handler: signal._HANDLER, wish: Wish, frame: FrameType | None) -> None:
    """A signal goes to a handler."""
    own = _asked(handler)
    if own is not None:
        own._hear(wish, frame)
    elif callable(handler):
        handler(wish.number, frame)
    elif handler == signal.SIG_DFL:
        signal.signal(wish.number, signal.SIG_DFL)
        signal.raise_signal(wish.number)


def _again(number: int, later: bool) -> None:
    if later:
        with contextlib.suppress(RuntimeError):  # there are no threads any more as the interpreter ends
            threading.Thread(target=_outside, args=(number,), name="fzero-signal", daemon=True).start()
    else:
        signal.raise_signal(number)


def _outside(number: int) -> None:
    """Sends it to the main thread once that is in no finalizer, where Python drops what a handler raises."""
    main = threading.main_thread().ident
    assert main is not None
    while _finalizes(sys._current_frames().get(main)):
        time.sleep(0.001)
    signal.pthread_kill(main, number)


def _finalizes(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def _as_before() -> None:
    """In a forked process signals go where they went before the loops of the process that it was forked from."""
    for number in (*SIGNALS, DEATH):
        handler = before = signal.getsignal(number)
        while (own := _asked(before)) is not None:
            before = own._before[number]
        if before is not handler:
            signal.signal(number, before)


os.register_at_fork(after_in_child=_as_before)
