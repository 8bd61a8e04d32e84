"""`pytest --strict-pure`: what becomes impure after its first run is refused in all tests, also on ranks."""

from __future__ import annotations

import pytest
from nightly import todays

BACKENDS = todays(["threads", "processes"], of=2)
TESTS = """
import pytest
import torch
import fzero as fz

kept = []


@fz.unit
def later(p, x):
    h = x @ p["w"]
    if len(x) > 2:
        kept.append(h.detach())
    return h


def runs(rank):
    step = fz.train_step(lambda p, x: later(p["block"], x).sum(), fz.sgd(0.1))
    step = step if rank is None else fz.shard_zero3(step)
    state = step.init({"block": {"w": torch.ones(4, 4)}})
    for x in (torch.ones(2, 4), torch.ones(3, 4)):
        state, _ = step(state, x)
    kept.clear()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks(backend):
    fz.testing.run_ranks(runs, 1, backend=backend)


def test_alone():
    runs(None)
"""


def test_what_begins_later_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_made_in_strict=TESTS.replace("BACKENDS", repr(BACKENDS)))
    always = ("-p", "fzero.testing.plugin", "-p", "no:cacheprovider")
    pytester.runpytest_inprocess(*always, "-k", "test_alone").assert_outcomes(passed=1, deselected=len(BACKENDS))
    found = pytester.runpytest_inprocess(*always, "--strict-pure")
    found.assert_outcomes(failed=1 + len(BACKENDS))
    found.stdout.fnmatch_lines(["*ValueError: Unit * keeps a tensor*test_made_in_strict.py*"] * (1 + len(BACKENDS)))
