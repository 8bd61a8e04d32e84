"""Every crash of a save: what lies on the disk is the old checkpoint or the new one, whole."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.crashes import Recorder, build, crashes
from nightly import NIGHTLY, in_turns

import fzero as fz
from fzero.checkpoint import files
from fzero.testing import run_ranks


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (p["w"] * x).sum()


def step_of(ranks: int) -> fz.Step:
    step = fz.train_step(loss, fz.sgd(0.5))
    return fz.shard_zero3(step) if ranks > 1 else step


def saves(ranks: int, folder: Path, count: int, save: Callable[[fz.TrainState], None]) -> list[str]:
    """Saves the state after some updates; what each rank was told, if anything."""

    def rank_main(rank: int) -> str:
        step = step_of(ranks)
        state = step.init({"w": torch.ones(130)})
        for _ in range(count):
            state, _ = step(state, torch.ones(130))
        try:
            save(state)
        except OSError as error:
            return str(error)
        return ""

    return run_ranks(rank_main, ranks)


def recorded(monkeypatch: pytest.MonkeyPatch, folder: Path, job: Callable[[], object]) -> Recorder:
    with monkeypatch.context() as patch:
        recorder = Recorder(str(folder))
        patch.setattr(files, "os", recorder)
        job()
    return recorder


def steps_left(recorder: Recorder, top: Path, restore: Callable[[Path], Any]) -> list[Any]:
    """What is restored after every crash."""
    found = []
    for left in crashes(recorder.before, recorder.ops):
        shutil.rmtree(top, ignore_errors=True)
        top.mkdir()
        build(left, str(top))
        found.append(restore(top / "run"))
    return found


def loaded(folder: Path) -> int | None:
    try:
        state = fz.load(folder, fz.train_step(loss, fz.sgd(0.5)))
    except FileNotFoundError:
        return None
    assert torch.equal(fz.gather(state.params)["w"], torch.full((130,), 1.0 - 0.5 * state.step))
    return state.step


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("before", [None, 1])
def test_every_crash_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int | None, ranks: int) -> None:
    """The first one, and one over a checkpoint."""
    folder, again = tmp_path / "it" / "run", tmp_path / "again"
    folder.parent.mkdir()
    save = lambda count: saves(ranks, folder, count, lambda state: fz.save(folder, state))
    if before is not None:
        save(before)
    recorder = recorded(monkeypatch, folder.parent, lambda: save(2))
    found = steps_left(recorder, again, lambda _: loaded(again / "it" / "run"))
    assert set(found) == {before, 2} and found[0] == before and found[-1] == 2


class Failing:
    """Stands for `os` where one operation fails."""

    NAMES = ("mkdir", "open", "pwrite", "fsync", "rename", "unlink", "ftruncate", "listdir")

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)

        def call(*given: Any) -> Any:
            self.count += 1
            if self.count == self.at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*given)

        return call if name in self.NAMES else real


@in_turns(2)
@pytest.mark.parametrize("ranks", [1, 2])
def test_any_operation_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """The old checkpoint or the new one is whole, the error is told, and the next save is as any other."""
    tried, told = 0, 0
    for at in itertools.count(1, 1 if NIGHTLY else 2):
        tried += 1
        folder = tmp_path / str(at)
        saves(ranks, folder, 1, lambda state, folder=folder: fz.save(folder, state))
        failing = Failing(at)
        with monkeypatch.context() as patch:
            patch.setattr(files, "os", failing)
            said = saves(ranks, folder, 2, lambda state, folder=folder: fz.save(folder, state))
        assert all("Input/output error" in each for each in said) or not any(said)
        told += any(said)
        if failing.count < at:
            break
        assert loaded(folder) in (1, 2)
        saves(ranks, folder, 3, lambda state, folder=folder: fz.save(folder, state))
        assert loaded(folder) == 3 and len(list(folder.iterdir())) == ranks + 1
    assert told > tried / 2


def restored(folder: Path, seen: set[frozenset[Path]]) -> int | None:
    """What is restored; the next save then leaves nothing of those that never ended, whichever files there are."""
    names = frozenset(folder.rglob("*"))
    step, kept = fz.train_step(loss, fz.sgd(0.5)), fz.Checkpoints(folder, keep=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is empty and is skipped")
        found = kept.restore(step)
    if names not in seen:
        seen.add(names)
        kept.save(step.init({"w": torch.ones(130)}))
        assert len(os.listdir(folder)) == 1
    return None if found is None else found[0].step


@in_turns(2)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    top = tmp_path / "it"
    top.mkdir()
    kept = fz.Checkpoints(top / "run", keep=1)

    def both() -> None:
        saves(ranks, top, 1, kept.save)
        saves(ranks, top, 2, kept.save)

    recorder = recorded(monkeypatch, top, both)
    seen = set[frozenset[Path]]()
    found = steps_left(recorder, tmp_path / "again", lambda _: restored(tmp_path / "again" / "it" / "run", seen))
    assert set(found) == {None, 1, 2} and found[-1] == 2
    once = [step or 0 for step in found]
    assert once == sorted(once)  # what was there once is not lost
