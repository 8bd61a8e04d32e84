"""assert_peak_bytes: the most that a function allocates."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fzero.planning.live import LiveBytes

Out = TypeVar("Out")


def assert_peak_bytes(fn: Callable[[], Out], limit: int) -> Out:
    """Calls `fn()`, asserts that it never allocates more than `limit` bytes at once, and returns the result.

    Example:
        >>> fz.testing.assert_peak_bytes(lambda: torch.zeros(10), 40).shape
        torch.Size([10])
    """
    with LiveBytes() as live:
        out = fn()
    if live.peak > limit:
        raise AssertionError(f"peak of {live.peak:,} bytes, expected at most {limit:,}")
    return out
