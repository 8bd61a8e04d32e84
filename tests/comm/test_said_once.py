"""An error that all ranks raise is printed once."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fzero.comm.said_once import SaidOnce

PROGRAM = """
    import torch, torch.distributed as dist
    import fzero as fz

    def loss_fn(params, x):
        return (x @ params["w"]).sum()

    dist.init_process_group("gloo")
    step = fz.shard_zero3(fz.train_step(loss_fn, fz.sgd(0.1)))
    step(step.init({"w": torch.ones(5, 4)}), torch.ones(3 + dist.get_rank(), 4))
"""


def test_a_shape_error_under_torchrun_has_one_trace(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    run = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    lines = [line for line in run.stderr.splitlines() if line.startswith("[rank")]
    assert run.returncode and sum("Traceback" in line for line in lines) == 1, run.stderr
    (short,) = [line for line in lines if "which prints the trace" in line]
    assert "mat1 and mat2" in short and sum(line.startswith(short[:8]) for line in lines) == 1
    assert any("in loss_fn" in line for line in lines if not line.startswith(short[:8]))


def raised(where: int) -> BaseException:
    try:
        if where:
            raise ValueError("one")
        raise ValueError("another")
    except ValueError as error:
        return error


@pytest.mark.parametrize(("places", "shown"), [((0, 0), [0]), ((0, 1), [0, 1])])
def test_errors_at_other_lines_are_all_printed(places: Any, shown: list[int], capsys: Any) -> None:
    store, seen = dist.HashStore(), list[int]()
    for rank, where in enumerate(places):
        hook = SaidOnce(lambda *_, rank=rank: seen.append(rank), rank, store)
        error = raised(where)
        hook(type(error), error, error.__traceback__)
    assert seen == shown and ("at the same lines as on rank 0" in capsys.readouterr().err) == (len(shown) == 1)


def test_a_rank_whose_store_has_gone_prints_its_trace() -> None:
    seen: list[object] = []
    hook = SaidOnce(lambda *args: seen.append(args), 1, None)  # type: ignore[arg-type]
    hook(KeyError, KeyError("x"), None)
    assert len(seen) == 1
