"""A pytest plugin: `pytest --hazards=SEED` runs all tests inside `fz.testing.hazards`, which makes races show.

Put `pytest_plugins = ["fzero.testing.plugin"]` into the conftest.py at the top. A module of tests that always wants
them has `pytestmark = pytest.mark.usefixtures("hazards")`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fzero.comm.hazards import hazards as make_hazards


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--hazards", nargs="?", const=0, type=int, default=None, metavar="SEED", help="run all tests in fzero's hazards"
    )


@pytest.fixture(scope="module")
def hazards(request: pytest.FixtureRequest) -> Iterator[None]:
    """Around the tests of a module: what is in flight reads as NaN, what is given back too, messages leave late."""
    with make_hazards(request.config.getoption("--hazards") or 0):
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--hazards") is not None:
        for item in items:
            item.fixturenames.insert(0, "hazards")  # type: ignore[attr-defined]
