"""A moment by which something must have happened."""

from __future__ import annotations

import math
import time

from fzero.base.arguments import need_number


def need_timeout(timeout: object, who: str) -> float:
    """A number of seconds that a wait may take; nothing waits for ever."""
    seconds = float(need_number(timeout, who, "timeout", "a number of seconds"))
    if not (0 <= seconds and math.isfinite(seconds)):
        raise ValueError(f"{who}: got timeout={timeout}, expected a finite number of seconds, at least 0.")
    return min(seconds, 1e6)  # what the waits of the system and of threads can take


class Deadline:
    """The moment `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until then, at least 0."""
        return max(self._end - time.monotonic(), 0.0)

    def milliseconds(self) -> int:
        """The same for poll, rounded up: 0 only once it has passed."""
        return math.ceil(self.left() * 1000)
