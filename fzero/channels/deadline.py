"""A moment by which something must have happened."""

from __future__ import annotations

import math
import time


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
        return min(math.ceil(self.left() * 1000), (1 << 31) - 1)
