"""Checkpoints of torch that are saved over: after any crash and any error the old one or the new, whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from compat.over import (
    NUMEL,
    Failing,
    met,
    params,
    recorded,
    saved,
    step_of,
    value_of,
)
from nightly import in_turns
from torch.distributed import barrier, get_rank

import fzero as fz
from fzero.checkpoint import files
from fzero.compat import dcp as reading
from fzero.compat import planners
from fzero.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # of dcp without a process group


def loaded_by_torch(folder: Path) -> float | None:
    if not (folder / ".metadata").exists():
        return None
    into = {"model": params(0.0), "optim": {"state": {name: {"exp_avg": torch.ones(NUMEL)} for name in "ab"}}}
    dcp.load(into, checkpoint_id=folder, no_dist=True)
    return value_of(into["model"])


def loaded_of_dcp(folder: Path) -> float | None:
    try:
        return value_of(fz.gather(fz.compat.load_dcp(folder, step_of()).params))
    except FileNotFoundError:
        return None


def torch_before(folder: Path) -> None:
    """A checkpoint that torch has written, with a file of its own name."""
    moments = {"exp_avg": torch.zeros(NUMEL), "exp_avg_sq": torch.zeros(NUMEL), "step": torch.tensor(1.0)}
    state = {"model": params(1.0), "optim": {"state": dict.fromkeys("ab", moments)}}
    dcp.save(state, checkpoint_id=folder, no_dist=True)


DCP = [("none", 1), ("torch", 1), ("ours", 1), ("ours", 2)]


def dcp_before(folder: Path, kind: str, ranks: int) -> float | None:
    folder.mkdir()
    if kind == "torch":
        torch_before(folder)
    elif kind == "ours":
        saved(folder, ranks, 1.0, fz.compat.save_dcp)
    return None if kind == "none" else 1.0


@in_turns(2)
@pytest.mark.parametrize(("kind", "ranks"), DCP)
def test_every_crash_of_a_checkpoint_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, ranks: int
) -> None:
    folder = tmp_path / "it"
    old = dcp_before(folder, kind, ranks)
    recorder = recorded(monkeypatch, folder, lambda: saved(folder, ranks, 2.0, fz.compat.save_dcp))
    assert {op.kind for op in recorder.ops} >= {"create", "write", "sync", "rename"}
    found = met(recorder, tmp_path / "again", lambda top: (loaded_of_dcp(top), loaded_by_torch(top)))
    assert {*found} == {(old, old), (2.0, 2.0)} and found[0] == (old, old) and found[-1] == (2.0, 2.0)
    assert len(os.listdir(folder)) == ranks + 1


@in_turns(3)
@pytest.mark.parametrize(("kind", "ranks"), [("none", 1), ("torch", 1), ("ours", 2)])
def test_any_operation_of_a_checkpoint_of_torch_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, ranks: int
) -> None:
    at, told = 0, 0
    old = dcp_before(tmp_path / "before", kind, ranks)
    while True:
        at += 1
        folder = Path(shutil.copytree(tmp_path / "before", tmp_path / str(at)))
        failing = Failing(at)
        with monkeypatch.context() as patch:
            patch.setattr(files, "os", failing)
            said = saved(folder, ranks, 2.0, fz.compat.save_dcp)
        assert all("Input/output error" in each for each in said) or not any(said)
        told += any(said)
        if failing.count < at:
            break
        found = loaded_of_dcp(folder)
        assert found == loaded_by_torch(folder) and (found in (old, 2.0) if any(said) else found == 2.0)
        saved(folder, ranks, 3.0, fz.compat.save_dcp)
        assert loaded_of_dcp(folder) == loaded_by_torch(folder) == 3.0 and len(os.listdir(folder)) == ranks + 1
    assert told > at / 2


def test_a_checkpoint_of_torch_is_saved_over_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch does it: into the files that lie there."""
    torch_before(tmp_path)
    real = reading.filled

    def meanwhile(*given: Any) -> Any:
        torch_before(tmp_path)
        return real(*given)

    monkeypatch.setattr(reading, "filled", meanwhile)
    with pytest.raises(fz.DamagedCheckpoint, match="was saved over while it was read"):
        loaded_of_dcp(tmp_path)


def test_ranks_read_one_checkpoint_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 1, 1.0, fz.compat.save_dcp)
    before, real = (tmp_path / ".metadata").read_bytes(), planners.Reader._text
    saved(tmp_path, 1, 2.0, fz.compat.save_dcp)

    def rank_main(rank: int) -> None:
        fz.compat.load_dcp(tmp_path, step_of(2))
        barrier()
        late = lambda reader: before if get_rank() == 1 else real(reader)
        monkeypatch.setattr(planners.Reader, "_text", late)
        barrier()
        with pytest.raises(ValueError, match=r"The checkpoints differ .*metadata with checksum"):
            fz.compat.load_dcp(tmp_path, step_of(2))

    run_ranks(rank_main, 2)
