"""A pytest plugin: contexts of `fz.testing` around all tests.

`pytest --hazards=SEED` runs them inside `fz.testing.hazards`, which makes races show. `pytest --strict-pure` runs them
inside `fz.testing.strict`, which proves in every run that functions are pure.

Put `pytest_plugins = ["fzero.testing.plugin"]` into the conftest.py at the top. A module of tests that always wants
them has `pytestmark = pytest.mark.usefixtures("hazards")`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fzero.comm.hazards import hazards as make_hazards
from fzero.purity.strict import strict


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--hazards", nargs="?", const=0, type=int, default=None, metavar="SEED", help="run all tests in fzero's hazards"
    )
    parser.addoption("--strict-pure", action="store_true", help="prove that functions are pure in every run of fzero")


@pytest.fixture(scope="module")
def hazards(request: pytest.FixtureRequest) -> Iterator[None]:
    """Around the tests of a module: what is in flight reads as NaN, what is given back too, messages leave late."""
    with make_hazards(request.config.getoption("--hazards") or 0):
        yield


@pytest.fixture
def strict_pure() -> Iterator[None]:
    """Around a test: every run of a step's function and of its units is proven to be pure."""
    with strict():
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = {"strict_pure": config.getoption("--strict-pure"), "hazards": config.getoption("--hazards") is not None}
    for item in items:
        item.fixturenames[:0] = [name for name, is_on in wanted.items() if is_on]  # type: ignore[attr-defined]
