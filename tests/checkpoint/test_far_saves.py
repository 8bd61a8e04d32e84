"""Saves from a device that is not the CPU, and loads onto it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from far.device import compiler
from nightly import in_turns

TESTS = Path(__file__).parents[1]


@in_turns(2, "a device that lies elsewhere")
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler makes the device")
def test_what_is_saved_is_what_was_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "far.saves", str(tmp_path)]
    ran = subprocess.run(command, cwd=TESTS, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0 and "9 of 9 alike" in ran.stdout, f"{ran.stdout}\n{ran.stderr}"
