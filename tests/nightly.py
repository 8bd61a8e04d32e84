"""Whether the tests run at length, as with HYPOTHESIS_PROFILE=nightly, and what runs only then."""

import os

import pytest
from hypothesis import settings

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
at_length = pytest.mark.skipif(not NIGHTLY, reason="runs with HYPOTHESIS_PROFILE=nightly")


def by_day(count: int) -> settings:
    """So many drawn examples of a dear test by day, and at length all that the profile says."""
    return settings(max_examples=settings().max_examples if NIGHTLY else count)
