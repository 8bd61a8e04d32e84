"""Which calls the ranks of one process still run once they are to end: those that one of them has begun."""

from __future__ import annotations

import threading


class Order:
    """What ranks on threads have begun: whoever is to end does the same as the others, or these would wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = -1
        self._last: int | None = None

    def close(self) -> None:
        """No rank begins a call that none has begun yet."""
        with self._lock:
            self._last = self._begun if self._last is None else self._last

    def begins(self, call: int) -> bool:
        """Notes that a rank is about to run a call; False where it must not any more."""
        with self._lock:
            if self._last is not None and call > self._last:
                return False
            self._begun = max(self._begun, call)
            return True

    def is_over(self, call: int) -> bool:
        """Tells whether a call will not be run any more."""
        with self._lock:
            return self._last is not None and call > self._last
