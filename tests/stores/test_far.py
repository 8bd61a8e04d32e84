"""State that is offloaded or saved from a device that is no CPU: one that is made for this, where there is no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from far.device import compiler
from nightly import NIGHTLY, in_turns

TESTS = Path(__file__).parents[1]


COUNT = "30" if NIGHTLY else "10"
PROGRAMS = {"far.steps": (("0", COUNT), f"{COUNT} of {COUNT} alike"), "far.saves": ((), "9 of 9 alike")}


@in_turns(10, "interpreters of their own")
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler makes the device")
@pytest.mark.parametrize("program", PROGRAMS)
def test_state_is_what_it_is_on_the_device(program: str, tmp_path: Path) -> None:
    """Of steps, with the bytes that cross, and of saves and loads; in a process of its own, which then has a device."""
    given, said = PROGRAMS[program]
    command = [sys.executable, "-m", program, *given, str(tmp_path)]
    ran = subprocess.run(command, cwd=TESTS, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0 and said in ran.stdout, f"{ran.stdout}\n{ran.stderr}"
