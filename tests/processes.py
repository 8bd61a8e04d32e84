"""Examples and benchmarks as their users start them, in processes of their own."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import forking
import pytest
from dispositions import as_in_a_terminal
from nightly import NIGHTLY

from fzero.base.forking import forking_context

EXAMPLES = Path(__file__).parent.parent / "examples"
# warnings are errors, but for one that is true of some machines
STRICT = ("-W", "error")
# nightly, ranks import torch themselves, which takes each of them three seconds
FORKING = () if NIGHTLY else (str(Path(__file__).parent / "forking.py"),)


def example(name: str) -> Any:
    """A script of examples/ as a module; it finds what lies beside it."""
    path = EXAMPLES / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        spec.loader.exec_module(module)
    return module


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


def run_example(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Which ends well; nightly in a process that nothing was imported in before."""
    if NIGHTLY:
        process = start_example(name, *options)
        done = subprocess.CompletedProcess([name, *options], 0, *process.communicate(timeout=240))
        done.returncode = process.returncode
    else:
        done = run_forked(str(EXAMPLES / name), *options)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr
    return done


def run_forked(*command: str) -> subprocess.CompletedProcess[str]:
    """As `python -W error SCRIPT ...` or `-c CODE ...`, forked from a process that has imported torch."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        context = forking_context("fzero.testing._ranks")
        process = context.Process(target=forking.program, args=(folder, environment, *command))
        process.start()
        process.join(240)
        if process.exitcode is None:
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
        said = [(Path(folder) / name).read_text() for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess(command, process.exitcode or 0, *said)
