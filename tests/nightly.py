"""How much of the tests runs: the cases of one day (`make test`), all (`pytest`), or more (HYPOTHESIS_PROFILE=nightly)."""

import itertools
import os
import zlib
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
at_length = pytest.mark.skipif(not NIGHTLY, reason="runs with HYPOTHESIS_PROFILE=nightly")


def in_turns(of: int) -> pytest.MarkDecorator:
    """With --day, one of so many of a test's cases runs: another one tomorrow, and each in as many days. One always does.

    Around a test, or as a module's `pytestmark`.
    """
    return pytest.mark.in_turns(of)


def others_turn(items: list[pytest.Item], day: int) -> list[pytest.Item]:
    """What does not run on a day."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("in_turns"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    found = []
    for test, own in cases.items():
        of = min(own[0].get_closest_marker("in_turns").args[0], len(own))  # type: ignore[union-attr]
        own.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))  # each day has values of every column
        found += [item for place, item in enumerate(own, zlib.crc32(test.encode())) if (place + day) % of]
    return found


def by_day(count: int) -> settings:
    """So many drawn examples of a dear test by day, and at length all that the profile says."""
    return settings(max_examples=settings().max_examples if NIGHTLY else count)


def by_turns(*columns: Iterable[Any], of: int = 2) -> list[tuple[Any, ...]]:
    """All combinations at length; by day every n-th one, in turns: each value beside every n-th of another column's."""
    combined = itertools.product(*[list(enumerate(column)) for column in columns])
    return [
        tuple([value for _, value in each])
        for each in combined
        if NIGHTLY or sum([place for place, _ in each]) % of == 0
    ]
