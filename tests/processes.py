"""Examples and benchmarks as their users start them, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from dispositions import as_in_a_terminal
from nightly import NIGHTLY

EXAMPLES = Path(__file__).parent.parent / "examples"
# warnings are errors, but for one that is true of some machines
STRICT = ("-W", "error")
# nightly, ranks import torch themselves, which takes each of them three seconds
FORKING = () if NIGHTLY else (str(Path(__file__).parent / "forking.py"),)


def start_example(name: str, *options: str) -> subprocess.Popen[str]:
    with as_in_a_terminal():
        return subprocess.Popen(
            [sys.executable, *STRICT, *FORKING, str(EXAMPLES / name), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )


def interrupt(process: subprocess.Popen[str], once: str) -> None:
    """Ctrl-C after the line that starts with `once`; the example ends well and says how far it came."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(once):
            break
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0 and "Traceback" not in stderr, stderr
    assert "stopped after" in stdout
