"""What a call leaves of this thread's own state, where an interrupt (Ctrl-C) ends it.

An interrupt may come between any two instructions, also while a context is entered or left, and then nothing puts back
what that had changed: torch's modes and levels, generators, variables. The outermost context of a call therefore notes
all of it beforehand. One interrupt is enough to break one context, never two: either that one is whole, or all inside.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from fzero.base import hooks, thread_state
from fzero.base.context import variables
from fzero.base.refusals import frames_of, is_of_library


class _Passed(threading.local):
    count = 0


_passed = _Passed()
_notes: list[Callable[[], Callable[[], object]]] = [thread_state.note_state, hooks.note_state]


def passed() -> int:
    """How many interrupts have ended calls on this thread: what was in use when one did may be half changed."""
    return _passed.count


def noted_by(note: Callable[[], Callable[[], object]]) -> Callable[[], Callable[[], object]]:
    """Has `note()` called before every call, and what that returns after an interrupt: it puts its part back."""
    _notes.append(note)
    return note


class as_found:
    """Inside, what an interrupt keeps contexts from putting back is put back at the end; it is raised as ever."""

    __slots__ = ("_restore", "_values")

    def __enter__(self) -> None:
        self._values = [(variable, variable.get()) for variable in variables]
        self._restore = [note() for note in _notes]

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        interrupt = error
        while isinstance(interrupt, Exception):
            interrupt = interrupt.__context__
        if interrupt is None or error is None:
            return
        _passed.count += 1
        _close_contexts(error)
        for restore in reversed(self._restore):
            restore()
        for variable, value in self._values:
            if variable.get() is not value:
                variable.set(value)
        frames = frames_of(error)
        if error is not interrupt and frames and is_of_library(frames[-1].f_code.co_filename):
            raise interrupt from error


def _close_contexts(error: BaseException) -> None:
    """Ends contexts that wait in the frames of an error, and would end when somebody lets go of it, at any time."""
    seen = set[int]()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        waiting += [each.__context__, each.__cause__]
        for frame in reversed(frames_of(each)):
            for value in [*frame.f_locals.values()]:
                generator = vars(value).get("gen") if isinstance(value, contextlib._GeneratorContextManager) else None
                if generator is not None and not generator.gi_running:
                    with contextlib.suppress(Exception):
                        generator.close()
