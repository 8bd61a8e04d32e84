"""Whether the tests run at length, as with HYPOTHESIS_PROFILE=nightly."""

import os

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
