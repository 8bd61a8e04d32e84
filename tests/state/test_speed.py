"""What is said of a CPU that is slow in a low-precision dtype: once, measured, and only where it is so."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

import fzero as fz
from fzero.state import speed


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """A CPU on which low precision takes 31 times as long; the dtypes measured."""
    measured: list[torch.dtype] = []

    def slowdown(dtype: torch.dtype) -> float:
        measured.append(dtype)
        return 31.2

    monkeypatch.setattr(speed, "slowdown", slowdown)
    monkeypatch.setattr(speed, "_said", set())
    return measured


def step_of(policy: fz.Policy | None = None) -> fz.Step:
    return fz.train_step(lambda p, x: (x @ p["w"]).sum(), fz.sgd(0.1), policy)


PARAMS = {"w": torch.ones(2, 2), "b": torch.ones(2)}


def test_autocast_on_a_slow_cpu_warns_once_with_the_figure(slow: list[torch.dtype]) -> None:
    step = fz.autocast(step_of())
    assert not slow  # nothing is measured where a step is written
    with pytest.warns(UserWarning, match=r"Slow in torch\.bfloat16.* 31 times .*float32.*'w'.*fz\.autocast") as said:
        step.init(PARAMS)
    assert len(said) == 1 and said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.init(PARAMS)
        fz.autocast(step_of()).init(PARAMS)
    assert slow == [torch.bfloat16]
    with pytest.warns(UserWarning, match=r"Slow in torch\.float16"):
        fz.autocast(step_of(), torch.float16).init(PARAMS)


def test_a_policy_that_computes_so_is_told_too(slow: list[torch.dtype]) -> None:
    with pytest.warns(UserWarning, match=r"Slow in torch\.bfloat16.*compute=torch\.float32"):
        step_of(fz.Policy.compact16()).init(PARAMS)


def test_nobody_else_is_told(slow: list[torch.dtype]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_of().init(PARAMS)
        step_of(fz.Policy(param=torch.bfloat16, compute=torch.float32)).init(PARAMS)
        fz.autocast(step_of()).init({"w": torch.ones(3)})  # no matrices
        fz.plan(fz.autocast(step_of()), PARAMS)
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            fz.autocast(step_of()).init({"w": torch.ones(2, 2), "b": torch.ones(2)})
    assert not slow


def test_a_quick_cpu_is_not_told(slow: list[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "slowdown", lambda dtype: 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fz.autocast(step_of()).init(PARAMS)


def test_a_real_cpu_without_the_instructions_is_told() -> None:
    """oneDNN is held to AVX2, where it can be: it then multiplies bfloat16 as such a CPU does."""
    code = """
import time, warnings, torch, fzero as fz
from fzero.state import speed
step = fz.autocast(fz.train_step(lambda p, x: (x @ p["w"]).sum(), fz.sgd(0.1)))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(2):
        step.init({"w": torch.ones(2, 2)})
print(speed.slowdown(torch.bfloat16), *[str(warning.message) for warning in said], sep="\\n")
"""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    done: Any = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    times, *said = done.stdout.splitlines()
    assert len(said) == (float(times) >= speed.SLOW), done.stdout
    for line in said:
        assert f"{float(times):.0f} times" in line
