"""How the ranks of one save tell each other what they have done, from threads that may not take part in collectives."""

from __future__ import annotations

import time
from collections.abc import Callable

from fzero.comm import backend


class Board:
    """Notes of one save, by name, that every rank can read.

    On several ranks they go through the process group's own store; the last rank to leave takes them away.
    """

    def __init__(self, token: str, ranks: int, timeout: float) -> None:
        self.token = token
        self._prefix, self._timeout, self._own = f"fzero/save/{token}/", timeout, dict[str, str]()
        self._store = backend.store() if ranks > 1 else None

    def post(self, name: str, text: str) -> None:
        if self._store is None:
            self._own[name] = text
        else:
            self._store.set(self._prefix + name, text)

    def read(self, name: str, who: Callable[[], str]) -> str:
        """The note, once it is there.

        Raises:
            TimeoutError: within the process group's timeout it was not; `who` says whose it is.
        """
        if self._store is None:
            return self._own[name]
        pause, end = 0.0005, time.monotonic() + self._timeout
        while not self._store.check([self._prefix + name]):
            if time.monotonic() > end:
                raise TimeoutError(f"{who()} within {self._timeout:.0f} s, the timeout of the process group")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
        return self._store.get(self._prefix + name).decode()

    def leave(self, ranks: int) -> None:
        """This rank needs no note any more; the last one takes them away."""
        if self._store is None or self._store.add(f"{self._prefix}left", 1) < ranks:
            return
        for name in ("begun", "ended", "left", *map(str, range(1, ranks))):
            self._store.delete_key(self._prefix + name)
