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
from hypothesis import example, settings

T = TypeVar("T")
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
NIGHTLY = PROFILE == "nightly"
FEW = 8  # drawn examples of a test that says nothing else
DAY = int(os.environ.setdefault("TESTS_DAY", str(datetime.date.today().toordinal()))) if PROFILE == "day" else None
at_length = pytest.mark.skipif(not NIGHTLY, reason="runs with HYPOTHESIS_PROFILE=nightly")


def in_turns(of: int, group: str = "") -> pytest.MarkDecorator:
    """One of so many of a test's cases runs on a day, another one the next, and one always does: each in so many days.

    Around a test, or as a module's `pytestmark`. Tests of one group are cases of one test.
    """
    return pytest.mark.in_turns(of, group)


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
        if mark := item.get_closest_marker("in_turns"):
            tests.setdefault(mark.args[1] or item.nodeid.partition("[")[0], []).append(item)
    found = set[pytest.Item]()
    for own in tests.values():
        of = own[0].get_closest_marker("in_turns").args[0]  # type: ignore[union-attr]
        found |= {*own} - {*todays(own, of, name=lambda item: item.nodeid)}
    return found


def example_in_turns(of: int, *values: Any, **named: Any) -> Any:
    """`hypothesis.example` on one of so many days."""
    place = zlib.crc32(repr((values, named)).encode())
    return example(*values, **named) if DAY is None or (place + DAY) % of == 0 else lambda test: test


def with_fewer_examples(items: list[pytest.Item]) -> None:
    """On a day, of the examples that a test draws the first fifth, and at least three."""
    for test in {getattr(item, "obj", None) for item in items}:
        if DAY is not None and getattr(test, "is_hypothesis_test", False):
            own = getattr(test, "_hypothesis_internal_use_settings", None) or settings()
            if own.max_examples >= FEW:
                fewer = max(3, own.max_examples // 5)
                test._hypothesis_internal_use_settings = settings(own, max_examples=fewer)  # type: ignore[union-attr]


def by_day(count: int) -> settings:
    """So many drawn examples of a dear test by day, and at length all that the profile says."""
    fewer = count if DAY is None else min(count, max(3, count // 5))
    return settings(max_examples=settings().max_examples if NIGHTLY else fewer)


def by_turns(*columns: Iterable[Any], of: int = 2) -> list[tuple[Any, ...]]:
    """All combinations at length; by day every n-th one, in turns: each value beside every n-th of another column's."""
    combined = itertools.product(*[list(enumerate(column)) for column in columns])
    return [
        tuple([value for _, value in each])
        for each in combined
        if NIGHTLY or sum([place for place, _ in each]) % of == 0
    ]
