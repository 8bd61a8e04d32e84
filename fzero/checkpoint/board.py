"""How the ranks of one save tell each other what they have done, from threads that may not take part in collectives."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from fzero.comm import backend

_LINGER = 60.0  # seconds that rank 0 stays for ranks that still read; they may have been killed


@contextlib.contextmanager
def _reached(who: Callable[[], str]) -> Iterator[None]:
    """Says whose end it was where the store that the notes go through is gone."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(f"{who()}, and the process that keeps the ranks' store has ended ({error})") from error


class Board:
    """Notes of one save, by name, that every rank can read.

    On several ranks they go through the process group's own store.
    """

    def __init__(self, token: str, ranks: int, timeout: float, rank: int) -> None:
        self.token, self._rank, self._shown = token, rank, time.monotonic()
        self._prefix, self._timeout, self._own = f"fzero/save/{token}/", timeout, dict[str, str]()
        self._store = backend.store() if ranks > 1 else None

    def post(self, name: str, text: str) -> None:
        if self._store is None:
            self._own[name] = text
        else:
            self._store.set(self._prefix + name, text)

    def go_on(self) -> None:
        """Shows now and then that this rank is getting on, as whoever waits for it otherwise gives up."""
        now = time.monotonic()
        if self._store is not None and now - self._shown > self._timeout / 8:
            self._shown = now
            self._store.add(f"{self._prefix}signs of {self._rank}", 1)

    def read(self, name: str, of: int, who: Callable[[], str]) -> str:
        """The note of a rank, once it is there.

        Raises:
            TimeoutError: within the process group's timeout it was not, nor a sign that the rank gets on; `who` says
                whose it is.
        """
        if self._store is None:
            return self._own[name]
        pause, signs, end = 0.0005, 0, time.monotonic() + self._timeout
        with _reached(who):
            while not self._store.check([self._prefix + name]):
                if time.monotonic() > end:
                    before, signs = signs, self._store.add(f"{self._prefix}signs of {of}", 0)
                    end += self._timeout
                    if signs == before:
                        self.post("gone", f"rank {self._rank} has given up waiting")
                        raise TimeoutError(f"{who()} within {self._timeout:.0f} s, the timeout of the process group")
                self.go_on()
                time.sleep(pause)
                pause = min(pause * 1.5, 0.05)
            return self._store.get(self._prefix + name).decode()

    def need_all(self) -> None:
        """Raises OSError where a rank has given up waiting: the save must end on every rank as it did there."""
        if self._store is not None and self._store.check([f"{self._prefix}gone"]):
            raise OSError(self._store.get(f"{self._prefix}gone").decode())

    def leave(self, rank: int, ranks: int) -> None:
        """This rank needs no note any more; rank 0 takes them away once none does, as the store may end with it."""
        if self._store is None:
            return
        left, end = f"{self._prefix}left", time.monotonic() + min(self._timeout, _LINGER)
        if rank > 0:
            with contextlib.suppress(RuntimeError):  # rank 0 has ended, and with it the store
                self._store.add(left, 1)
            return
        while self._store.add(left, 0) < ranks - 1 and time.monotonic() < end:
            time.sleep(0.001)
        signs = [f"signs of {rank}" for rank in range(ranks)]
        for name in ("begun", "ended", "left", "gone", *map(str, range(1, ranks)), *signs):
            self._store.delete_key(self._prefix + name)
