"""Fake tensors on threads: what a rank makes there is nothing to those that are made when it has ended."""

from __future__ import annotations

import pytest
from nightly import at_length, in_turns
from processes import run_forked

PROGRAM = """
import torch
import fzero as fz
from fzero.base.thread_state import without_values

def fakes(rank=0):
    with without_values():
        return torch.ones(2).shape

{on_threads}
words = ["undefined" * 2 + str(i) for i in range(10_000)]  # takes the memory that threads have left
assert fakes() == (2,)
"""
ON_THREADS = {
    "run_ranks": "for _ in range(3):\n    fz.testing.run_ranks(fakes, 2)",
    "ranks that fz plays": "from fzero.comm.playing import play\nplay({'data': 2}, fakes)",
    "a component": """
def build(rank):
    fakes()
    return fz.train_step(lambda p, x: (x @ p["w"]).sum(), fz.sgd(0.1)), {"w": torch.ones(2, 2)}

with fz.remote(build, 2, "threads") as own:
    own.init()
""",
}


@in_turns(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=at_length if name == "ranks that fz plays" else ()) for name in ON_THREADS]
)
def test_fakes_are_made_after_threads_that_made_some_have_ended(name: str) -> None:
    program = PROGRAM.format(on_threads=ON_THREADS[name])
    done = run_forked("-c", program)
    assert done.returncode == 0, done.stderr
