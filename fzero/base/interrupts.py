"""What a call leaves of this thread's own state, where an error or an interrupt (Ctrl-C) ends it.

An interrupt may come between any two instructions, also while a context is entered or left, and then nothing puts back
what that had changed: torch's modes and levels, generators, variables. The outermost context of a call therefore notes
all of it beforehand. One interrupt is enough to break one context, never two: either that one is whole, or all inside.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import types
from collections.abc import Iterator

from fzero.base import hooks, random, thread_state
from fzero.base.context import variables
from fzero.base.refusals import frames_of, is_library


class _Passed(threading.local):
    count = 0


_passed = _Passed()


def passed() -> int:
    """How many errors have ended calls on this thread: what was in use when one did may be half changed."""
    return _passed.count


class as_found:
    """Inside, what an error keeps contexts from putting back is put back at the end; it is raised as ever.

    An error that the library raises of an interrupt (KeyboardInterrupt and the like) makes way for that one.
    """

    __slots__ = ("_before", "_restores", "_values")

    def __enter__(self) -> None:
        self._before = sys.exception()  # that is being handled around the call
        self._values = [(variable, variable.get()) for variable in variables]
        self._restores = [note() for note in (thread_state.note_state, hooks.note_state, random.note_regions)]

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            return
        _passed.count += 1
        chain = self._chain(error)
        hooks.end_waiting(chain)
        for restore in reversed(self._restores):
            restore()
        for variable, value in self._values:
            if variable.get() is not value:
                variable.set(value)
        interrupt = next((each for each in chain if not isinstance(each, Exception)), error)
        frames = frames_of(error)
        if error is not interrupt and frames and is_library(frames[-1].f_code.co_filename):
            raise interrupt from error

    def _chain(self, error: BaseException) -> list[BaseException]:
        """The error, and those in whose handling or by which it was raised inside."""
        found: list[BaseException] = []
        waiting: list[BaseException | None] = [error]
        while waiting:
            each = waiting.pop()
            if each is not None and each is not self._before and all(each is not other for other in found):
                found.append(each)
                waiting += [each.__cause__, each.__context__]
        return found


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
