"""Units that are compiled, without a compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from nightly import at_length


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
