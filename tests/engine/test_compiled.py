"""Code that is compiled runs as it is under a functorch level, and a module with hooks has code of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from nightly import at_length
from torch import nn

from fzero.engine.compiled import _with_own_code, compiled


def test_under_a_level_it_runs_as_it_is() -> None:
    ran: list[bool] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        ran.append(torch.compiler.is_compiling())
        return x.square()

    assert torch.func.grad(compiled(fn))(torch.tensor(3.0)) == 6.0 and ran == [False]


def test_own_code_is_the_same_function() -> None:
    by = 2.0

    def scaled(x: Any, plus: float = 1.0) -> Any:
        return by * x + plus

    other: Any = _with_own_code(scaled)
    assert other is not scaled and other.__code__ is not scaled.__code__ and other(3.0) == scaled(3.0) == 7.0
    module = nn.Linear(2, 2)
    method: Any = _with_own_code(module.forward)
    assert method.__self__ is module and method.__func__.__code__ is not module.forward.__func__.__code__  # type: ignore[attr-defined]
    assert _with_own_code(module) is module


@at_length
def test_without_a_compiler_torchs_own_words_are_left(tmp_path: Path) -> None:
    """The error carries the compiler's objects, which are no outputs of the unit."""
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, fzero as fz\n"
        "block = fz.unit(lambda p, x: torch.tanh(x @ p['w']))\n"
        "fn = lambda p, x: block(p[1], block(p[0], x)).sum()\n"
        "step = fz.compile(fz.train_step(fn, fz.sgd(0.1)))\n"
        "step(step.init([{'w': torch.eye(8)}, {'w': torch.eye(8)}]), torch.ones(4, 8))\n"
    )
    environment = {**os.environ, "CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if re.match(r"[\w.]*Error: ", line)]
    assert done.returncode == 1 and "No working C++ compiler found" in errors[-1]
