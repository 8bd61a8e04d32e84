"""Functions that ranks in other processes are given by name."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nightly import in_turns

import fzero as fz
from fzero.base.forking import loaded
from fzero.testing import RankError, run_ranks

NEEDED = r"cannot find the function.*notebook.*\.py file and import it.*threads"


def typed(_: int) -> Any:
    """As a notebook defines one, in a __main__ that other processes do not have."""
    return fz.train_step(lambda p, x: x.sum(), fz.sgd(0.1)), {"w": torch.zeros(1)}


@pytest.fixture
def in_notebook(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
    monkeypatch.setattr(typed, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "typed", typed, raising=False)
    return typed


def test_what_is_not_there_is_named(in_notebook: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    job = pickle.dumps(in_notebook)
    assert loaded(job, "here", "threads") is typed
    monkeypatch.delattr(sys.modules["__main__"], "typed")
    with pytest.raises(TypeError, match=rf"^here: .*{NEEDED}"):
        loaded(job, "here", "threads")


def test_functions_of_a_notebook_on_processes(in_notebook: Callable[[int], Any]) -> None:
    with pytest.raises(RankError, match=rf"run_ranks\(backend='processes'\): .*{NEEDED}"):
        run_ranks(in_notebook, 1, backend="processes")
    with pytest.raises(TypeError, match=rf"fz\.remote\(on='processes'\): .*{NEEDED}"):
        fz.remote(in_notebook, 1, "processes")


PROGRAM = """
import functools, operator
import fzero as fz

def main(rank):
    return rank

for run in (lambda: fz.testing.run_ranks(main, 2, backend="processes"), lambda: fz.remote(main, 1, "processes")):
    try:
        run()
    except (TypeError, fz.testing.RankError) as error:
        print(*[line for line in str(error).splitlines() if "cannot find the function" in line])
print(fz.testing.run_ranks(functools.partial(operator.add, 3), 2, backend="processes"))
"""


@in_turns(10, "interpreters of their own")
def test_a_main_that_is_no_file_is_not_taken_for_another() -> None:
    """What starts processes has a `main` in its own __main__."""
    run = subprocess.run([sys.executable], input=PROGRAM, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    ranks, remote, sums = run.stdout.splitlines()
    assert "run_ranks(backend='processes'): " in ranks and "fz.remote(on='processes'): " in remote
    assert all(re.search(NEEDED, line) for line in (ranks, remote)) and sums == "[3, 4]"
