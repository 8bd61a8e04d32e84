"""Whether the tests run at length, as with HYPOTHESIS_PROFILE=nightly, and what runs only then."""

import itertools
import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
at_length = pytest.mark.skipif(not NIGHTLY, reason="runs with HYPOTHESIS_PROFILE=nightly")


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
