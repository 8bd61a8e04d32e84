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
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "train.py"]
    for _ in range(3):  # torchrun may end a rank before it has said anything
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=env)
        lines = [line for line in run.stderr.splitlines() if line.startswith("[rank")]
        traces, short = ([line for line in lines if text in line] for text in ("Traceback", "which prints the trace"))
        if len(traces) + len(short) == 3:
            break
    assert run.returncode and len(traces) + len(short) == 3 and "[rank0]" in "".join(traces), run.stderr
    for line in short:
        assert "mat1 and mat2" in line and sum(other.startswith(line[:8]) for other in lines) == 1
    assert sum("in loss_fn" in line for line in lines) == len(traces) <= 2


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


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError


def failed(how: str, rank: int) -> BaseException:
    within: dict[str, Any] = {"cause": ValueError(rank), "cause alike": ValueError()}
    try:
        try:
            raise within.get(how) or KeyError("one")
        except Exception as before:
            if how == "group":
                raise ExceptionGroup("some", [ValueError(rank)]) from None
            error = Silent() if how == "silent" else ValueError(f"\nof {rank}")
            error.add_note(f"noted on {rank}")
            raise error from (before if how.startswith("cause") else None)
    except Exception as error:
        return error


@pytest.mark.parametrize("how", ["cause", "cause alike", "group", "message", "silent"])
@pytest.mark.parametrize("local", [None, 0, 1])
def test_nothing_is_lost_of_an_error_on_any_rank(how: str, local: int | None, monkeypatch: Any, capsys: Any) -> None:
    """What differs is printed by both; a machine's first rank, whose output is looked at, prints its trace anyway."""
    store, seen = dist.HashStore(), list[int]()
    monkeypatch.setenv("LOCAL_RANK", str(local))
    for rank in range(2):
        error = failed(how, rank)
        SaidOnce(lambda *_, rank=rank: seen.append(rank), rank, store)(type(error), error, error.__traceback__)
    said = capsys.readouterr().err
    assert seen == ([0, 1] if how in ("cause", "group") or local == 0 else [0])
    if len(seen) == 1:
        assert "noted on 1" in said and (how == "silent" or "of 1" in said)
        assert all(line.startswith("[rank1]: ") for line in said.splitlines() if line)


def test_a_rank_whose_store_has_gone_prints_its_trace() -> None:
    seen: list[object] = []
    hook = SaidOnce(lambda *args: seen.append(args), 1, None)  # type: ignore[arg-type]
    hook(KeyError, KeyError("x"), None)
    assert len(seen) == 1
