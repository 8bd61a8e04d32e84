"""Saves over what lies there, each of their crashes and errors: for the tests of others' files."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint import test_crashes
from checkpoint.crashes import LOST, Recorder, build, crashes, replayed
from checkpoint.crashes import _durable as durable

import fzero as fz
from fzero.checkpoint import files
from fzero.compat import export
from fzero.testing import run_ranks

SEVERAL, ONE, NUMEL = 200, 10**9, 40
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def step_of(ranks: int = 1) -> fz.Step:
    step = fz.train_step(lambda p, x: (p["a"] * x).sum() + p["b"].sum(), fz.adamw(0.1))
    return fz.shard_zero3(step) if ranks > 1 else step


def params(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((NUMEL,), value) for name in "ab"}


Save = Callable[[Path, Any], None]


def saved(folder: Path, ranks: int, value: float, save: Save) -> list[str]:
    """What each rank was told of a save, if anything."""

    def rank_main(rank: int) -> str:
        try:
            save(folder, step_of(ranks).init(params(value)))
        except OSError as error:
            return str(error)
        return ""

    return run_ranks(rank_main, ranks)


def exported(folder: Path, state: Any, most: int = ONE) -> None:
    fz.save_safetensors(folder, state, shard_bytes=most)


several = functools.partial(exported, most=SEVERAL)


def value_of(tree: dict[str, torch.Tensor]) -> float:
    """The one that all elements have."""
    (value,) = {float(x) for leaf in tree.values() for x in leaf}
    assert {name: leaf.numel() for name, leaf in tree.items()} == {"a": NUMEL, "b": NUMEL}
    return value


def by_us(folder: Path) -> float | None:
    try:
        return value_of(fz.gather(fz.load_safetensors(step_of(), folder).params))
    except FileNotFoundError:
        return None


def before(folder: Path, kind: str, ranks: int) -> None:
    """A folder with a model of ones in one file, or with none."""
    folder.mkdir(parents=True)
    if kind == "one":
        saved(folder, ranks, 1.0, exported)


def recorded(monkeypatch: pytest.MonkeyPatch, top: Path, job: Callable[[], object]) -> Recorder:
    with monkeypatch.context() as patch:
        recorder = Recorder(str(top))
        for module in (files, export):
            patch.setattr(module, "os", recorder)
        job()
    return recorder


def met(recorder: Recorder, again: Path, load: Callable[[Path], Any]) -> list[Any]:
    """What is loaded after each crash, where what readers see differs; last, what is durable as the save returns."""
    ops, seen, found = recorder.ops, set[tuple[object, ...]](), []
    lost = {number: LOST for number in range(len(ops)) if not durable(ops, number)}
    last = replayed(recorder.before, ops, lost).files()
    for left in (*crashes(recorder.before, ops), last):
        shown = {path: content for path, content in left.items() if not os.path.basename(path).startswith(".model")}
        if (key := tuple(shown.items())) in seen and left is not last:
            continue
        seen.add(key)
        shutil.rmtree(again, ignore_errors=True)
        again.mkdir()
        build(shown, str(again))
        found.append(load(again / recorder.top.rpartition("/")[2]))
    return found


class Failing(test_crashes.Failing):
    NAMES = (*test_crashes.Failing.NAMES, "posix_fallocate")
