"""Whether the tests run at length, as with HYPOTHESIS_PROFILE=nightly, and what runs only then."""

import os

import pytest

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
at_length = pytest.mark.skipif(not NIGHTLY, reason="runs with HYPOTHESIS_PROFILE=nightly")
