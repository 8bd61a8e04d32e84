"""An error that several ranks under torchrun raise at the same lines: few print the trace, the others its message."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import sys
import textwrap
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from fzero.base.refusals import is_of_library

_PATIENCE = datetime.timedelta(seconds=5)  # torchrun ends the one that prints where another has exited


class Store(Protocol):
    def add(self, key: str, amount: int, /) -> int: ...

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def wait(self, keys: list[str], timeout: datetime.timedelta, /) -> None: ...


class SaidOnce:
    """A `sys.excepthook`.

    Args:
        show: the one before it.
        store: of all ranks.
    """

    def __init__(self, show: Callable[..., object], rank: int, store: Store) -> None:
        self._show, self._rank, self._store = show, rank, store

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)]
        users = [place for place in places if not is_of_library(place[0])]
        key = where = ""
        with contextlib.suppress(Exception):  # or the store has ended with its rank
            said = repr((kind.__name__, users, _within(error), os.environ.get("TORCHELASTIC_RESTART_COUNT")))
            key = f"fzero/failed/{hashlib.sha256(said.encode()).hexdigest()}"
            # the first one of a machine is the one that is looked at
            if issubclass(kind, Exception) and self._store.add(key, 1) > 1 and os.environ.get("LOCAL_RANK") != "0":
                self._store.wait([f"{key}/by"], _PATIENCE)
                where = self._store.get(f"{key}/by").decode()
        if where:
            text = "".join(traceback.format_exception_only(kind, error)).rstrip()
            sys.stderr.write(textwrap.indent(f"{text} (at the same lines as on {where})\n", f"[rank{self._rank}]: "))
            return
        self._show(kind, error, trace)
        with contextlib.suppress(Exception):
            self._store.set(f"{key}/by", f"rank {self._rank}, which prints the trace")


def _within(error: BaseException) -> list[list[str]]:
    """The traces of its cause and of its members, which no line repeats: where they differ, the error is another."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return [traceback.format_exception(own) for own in (before, *members) if own is not None]


def say_once(rank: int, store: Store) -> None:
    """Lets this process print no more than the message of an error whose trace another rank has printed."""
    if not isinstance(sys.excepthook, SaidOnce):
        sys.excepthook = SaidOnce(sys.excepthook, rank, store)
