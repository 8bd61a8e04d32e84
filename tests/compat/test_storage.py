"""Checkpoints of torch that are saved over while they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from compat.over import NUMEL, params, saved, step_of, value_of
from torch.distributed import barrier, get_rank

import fzero as fz
from fzero.checkpoint import fill
from fzero.compat import planners
from fzero.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # of dcp without a process group


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


def test_a_checkpoint_of_torch_is_saved_over_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch does it: into the files that lie there."""
    torch_before(tmp_path)
    real = fill._filled

    def meanwhile(*given: Any) -> Any:
        torch_before(tmp_path)
        return real(*given)

    monkeypatch.setattr(fill, "_filled", meanwhile)
    with pytest.raises(fz.DamagedCheckpoint, match="was saved over while it was read"):
        loaded_of_dcp(tmp_path)


def test_ranks_read_one_checkpoint_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 1, 1.0, fz.compat.save_dcp)
    before, real = (tmp_path / ".metadata").read_bytes(), planners.Reader._text
    (tmp_path / ".metadata").unlink()
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
