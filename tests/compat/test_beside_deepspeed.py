"""fz.compat.from_deepspeed against DeepSpeed itself, where it is installed: losses, and a run that is taken over."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import run_deepspeed as theirs
import torch
from torch.nn import functional as F

import fzero as fz

if "DEEPSPEED_LOSSES" not in os.environ and importlib.util.find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed", allow_module_level=True)


pytestmark = pytest.mark.timeout(900)  # the first test waits for all of DeepSpeed's runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What DeepSpeed has written; DEEPSPEED_LOSSES names a folder of another environment's."""
    if kept := os.environ.get("DEEPSPEED_LOSSES"):
        return Path(kept)
    out = tmp_path_factory.mktemp("deepspeed")
    subprocess.run([sys.executable, theirs.__file__, str(out)], check=True, capture_output=True, timeout=800)
    return out


def made_of(name: str, stage: int) -> tuple[Any, Any]:
    apply, params = fz.functional(theirs.net())
    low = torch.bfloat16 if "bf16" in name else torch.float32

    def fn(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(apply(params, x.to(low)).float(), y)

    return fz.compat.from_deepspeed(theirs.config_of(name, stage), fn), params


def losses(rank: int, name: str, stage: int, folder: Path | None = None) -> list[float]:
    made, params = made_of(name, stage)
    begun = theirs.SAVED if folder else 0
    state = fz.compat.load_deepspeed(folder, made.step, like=params) if folder else made.step.init(params)
    out = []
    for step in range(begun, theirs.STEPS):
        parts = [theirs.batch(step, rank, part) for part in range(theirs.microbatches(name))]
        state, metrics = made.step(state, *[torch.cat(each) for each in zip(*parts, strict=True)])
        out.append(metrics["loss"].item())
    return out


@pytest.mark.parametrize(("name", "stage"), theirs.CASES)
def test_losses_are_those_of_deepspeed(folder: Path, name: str, stage: int) -> None:
    want = json.loads((folder / f"{name}-{stage}.json").read_text())
    found = fz.testing.run_ranks(functools.partial(losses, name=name, stage=stage), theirs.RANKS)[0]
    assert found == pytest.approx(want, rel=0, abs=2e-3 if "bf16" in name else 1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_goes_on(folder: Path, stage: int) -> None:
    """Its checkpoint and its configuration."""
    want = json.loads((folder / f"adamw-{stage}.json").read_text())[theirs.SAVED :]
    run = functools.partial(losses, name="adamw", stage=stage, folder=folder / f"adamw-{stage}")
    assert fz.testing.run_ranks(run, theirs.RANKS)[0] == pytest.approx(want, rel=0, abs=1e-5)
