"""An update in one pass over memory has the same bits in one piece and in chunks."""

from __future__ import annotations

import pytest
import torch
import updates

import fzero as fz
from fzero.kernels import build, onepass


def test_chunks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "kernel", lambda *_: None)  # the eager path
    run = lambda: updates.updated("lion", fz.Policy.compact16(), 64 * 37, False)
    whole = run()
    monkeypatch.setattr(onepass, "CHUNK", 64)
    assert all(torch.equal(a, b) for a, b in zip(whole, run(), strict=True))
