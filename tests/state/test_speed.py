"""What a low-precision dtype costs on this CPU: measured once, whichever thread asks."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from nightly import in_turns

from fzero.state import speed


def test_it_is_measured_once_and_threads_stay_as_they_are() -> None:
    """Ranks that are threads ask at once."""
    speed._measured.cache_clear()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(speed.slowdown, [torch.bfloat16] * 4))
        assert torch.get_num_threads() == 2 and len({*found}) == 1 and speed._measured.cache_info().misses == 1
    finally:
        torch.set_num_threads(before)


@in_turns(10, "interpreters of their own")
def test_a_cpu_without_the_instructions() -> None:
    """oneDNN is held to AVX2, where it can be: it then multiplies bfloat16 as such a CPU does."""
    code = "import torch; from fzero.state import speed; print(speed.slowdown(torch.bfloat16))"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert float(done.stdout) > 0
