"""State that is offloaded from a device that is not the CPU: one that is made for this, where there is no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from far.device import compiler
from nightly import NIGHTLY, in_turns

TESTS = Path(__file__).parents[1]


@in_turns(2, "a device that lies elsewhere")
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler makes the device")
def test_steps_are_those_with_all_state_on_the_device(tmp_path: Path) -> None:
    """Numbers, and the bytes that cross; in a process of its own, which then has an accelerator."""
    count = "30" if NIGHTLY else "10"
    command = [sys.executable, "-m", "far.steps", "0", count, str(tmp_path)]
    ran = subprocess.run(command, cwd=TESTS, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0 and f"{count} of {count} alike" in ran.stdout, f"{ran.stdout}\n{ran.stderr}"
