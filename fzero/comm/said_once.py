"""An error that several ranks under torchrun raise at the same lines: one prints the trace, the others a line."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import sys
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
        said = repr((kind.__name__, users, os.environ.get("TORCHELASTIC_RESTART_COUNT")))
        key, where = f"fzero/failed/{hashlib.sha256(said.encode()).hexdigest()}", ""
        with contextlib.suppress(Exception):  # or the store has ended with its rank
            if issubclass(kind, Exception) and self._store.add(key, 1) > 1:
                self._store.wait([f"{key}/by"], _PATIENCE)
                where = self._store.get(f"{key}/by").decode()
        if where:
            text = next(iter(str(error).splitlines()), "")
            sys.stderr.write(f"[rank{self._rank}]: {kind.__name__}: {text} (at the same lines as on {where})\n")
            return
        self._show(kind, error, trace)
        with contextlib.suppress(Exception):
            self._store.set(f"{key}/by", f"rank {self._rank}, which prints the trace")


def say_once(rank: int, store: Store) -> None:
    """Lets this process print a trace that another rank has printed as one line."""
    if not isinstance(sys.excepthook, SaidOnce):
        sys.excepthook = SaidOnce(sys.excepthook, rank, store)
