"""`fz.keep_memory`, and memory that goes back to the system at once."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nightly import in_turns
from torch._subclasses.fake_tensor import FakeTensorMode

import fzero as fz
from fzero.base import pages
from fzero.testing import LiveBytes

STATM = Path("/proc/self/statm")
GLIBC = hasattr(ctypes.CDLL(None), "gnu_get_libc_version") and STATM.exists()
KEPT = """
import sys, torch
import fzero as fz
if sys.argv[1] == "keep":
    fz.keep_memory()
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
before = resident()
for _ in range(3):
    x = torch.ones(64 << 20, dtype=torch.uint8)
    del x
print(resident() - before)
"""


@in_turns(10, "interpreters of their own")
@pytest.mark.skipif(not GLIBC, reason="no glibc here")
@pytest.mark.parametrize(("how", "kept"), [("keep", True), ("do not", False)])
def test_keep_memory(how: str, kept: bool) -> None:
    environment = {name: x for name, x in os.environ.items() if not name.startswith("MALLOC_")}
    out = subprocess.run(
        [sys.executable, "-c", KEPT, how], capture_output=True, text=True, check=True, env=environment
    ).stdout
    assert (int(out) > 60 << 20) is kept, f"{int(out) >> 20} MiB stay"


def test_without_glibc_it_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    with pytest.warns(UserWarning, match="no glibc"):
        fz.keep_memory()


@pytest.mark.skipif(not STATM.exists(), reason="Linux only")
def test_mapped_memory_goes_back() -> None:
    def resident() -> int:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    many = [pages.empty(2 << 20, torch.float32, "cpu", mapped=True).fill_(1) for _ in range(8)]
    assert all(x.dtype == torch.float32 and x.shape == (2 << 20,) and x.data_ptr() % 4096 == 0 for x in many)
    assert resident() - before > 60 << 20
    view = many[0][5:6]
    del many
    assert resident() - before < 16 << 20 and view == 1, "a view keeps what it is of, and nothing else is kept"


def test_mapped_memory_is_counted_and_faked() -> None:
    with LiveBytes() as live:
        x = pages.empty(1 << 20, torch.float32, "cpu", mapped=True)
        assert live.now() == x.nbytes
        del x
        assert live.now() == 0
    with FakeTensorMode():
        assert pages.empty(1 << 20, torch.float32, "cpu", mapped=True).shape == (1 << 20,)
