"""Asserts on communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from fzero.comm.divergence import recorded_collectives


def assert_collectives(fn: Callable[[], object], expected: Mapping[str, int]) -> Any:
    """Calls `fn()`, checks how often each collective ran on this rank, and returns the result.

    Args:
        fn: what is counted.
        expected: "all_gather", "reduce_scatter", "all_reduce" -> number; what is not named is not counted.

    Example:
        >>> fz.testing.assert_collectives(lambda: 1, {"all_gather": 0})
        1
    """
    with recorded_collectives() as record:
        out = fn()
    counts = Counter(operation for operation, _, _ in record)
    wrong = {name: (counts[name], number) for name, number in expected.items() if counts[name] != number}
    if wrong:
        listing = ", ".join(f"{name}: {got}, expected {want}" for name, (got, want) in wrong.items())
        raise AssertionError(f"{listing}. In order: {[(operation, tag) for operation, tag, _ in record]}")
    return out
