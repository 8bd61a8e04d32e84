"""How much of the tests runs, by HYPOTHESIS_PROFILE: the cases of a day ("day", of `make test`), all, more ("nightly").

The day is today, or TESTS_DAY=N.
"""

import datetime
import itertools
import os
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import settings

T = TypeVar("T")
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
NIGHTLY = PROFILE == "nightly"
DAY = int(os.environ.setdefault("TESTS_DAY", str(datetime.date.today().toordinal()))) if PROFILE == "day" else None
at_length = pytest.mark.skipif(not NIGHTLY, reason="runs with HYPOTHESIS_PROFILE=nightly")


def in_turns(of: int) -> pytest.MarkDecorator:
    """One of so many of a test's cases runs on a day, another one the next, and one always does: each in so many days.

    Around a test, or as a module's `pytestmark`.
    """
    return pytest.mark.in_turns(of)


def todays(cases: Sequence[T], of: int, name: Any = repr) -> list[T]:
    """The cases of a loop whose turn it is: one of so many, at least one, and all where not only a day's run."""
    if DAY is None:
        return [*cases]
    drawn = sorted(cases, key=lambda case: zlib.crc32(name(case).encode()))  # each day has values of every column
    own = {id(case) for case in drawn[DAY % min(of, len(cases)) :: min(of, len(cases))]}
    return [case for case in cases if id(case) in own]


def of_other_days(items: list[pytest.Item]) -> set[pytest.Item]:
    """What is not today's of tests in turns."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("in_turns"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    found = set[pytest.Item]()
    for own in tests.values():
        of = own[0].get_closest_marker("in_turns").args[0]  # type: ignore[union-attr]
        found |= {*own} - {*todays(own, of, name=lambda item: item.nodeid)}
    return found


def by_day(count: int) -> settings:
    """So many drawn examples of a dear test by day, and at length all that the profile says."""
    most = settings().max_examples
    return settings(max_examples=most if NIGHTLY else count if DAY is None else min(count, most))


def by_turns(*columns: Iterable[Any], of: int = 2) -> list[tuple[Any, ...]]:
    """All combinations at length; by day every n-th one, in turns: each value beside every n-th of another column's."""
    combined = itertools.product(*[list(enumerate(column)) for column in columns])
    return [
        tuple([value for _, value in each])
        for each in combined
        if NIGHTLY or sum([place for place, _ in each]) % of == 0
    ]
