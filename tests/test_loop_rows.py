"""What fz.loop writes of its numbers: each under its own name and step, and only what it can say."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from looping import STEP, batch, begun, counted, of_kept, quiet, rows_of, run_through

import fzero as fz
from fzero.loops import record
from fzero.testing import run_ranks

# ---- numbers


@pytest.mark.parametrize("value", [np.float64(1.5), np.float32(1.5), True, 2, torch.tensor(True), torch.tensor(7)])
def test_numbers_of_any_kind_are_floats(value: Any, tmp_path: Path) -> None:
    options: Any = {"evaluate": lambda state: {"held out": value}, "log": tmp_path / "log.csv", "total": 2}
    run = run_through(quiet(lambda state, x: (state, {"own": value}), 0, batch, **options))
    for name in ("own", "held out"):
        assert type(run.logged[name]) is float and run.logged[name] == float(value)
        assert rows_of(tmp_path / "log.csv")[-1][name] == repr(float(value))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"step": 1.0}, r"\['step'\] for the column 'step'"),
        ({"seconds": 1.0}, r"\['seconds'\] for the column 'seconds'"),
        ({1: 1.0}, "the name 1 in"),
        ({"a": torch.ones(2), "a.0": 1.0}, r"for the column 'a.0'"),
        ({"a.1": 1.0, "a": torch.ones(2)}, r"for the column 'a.1'"),
        ({"a": torch.tensor(1j)}, r"\['a'\] of a tensor of shape \(\) and dtype torch.complex64"),
        ({"a": 1j}, r"\['a'\] of complex"),
        ({"a": torch.ones(0)}, r"\['a'\] of a tensor of shape \(0,\)"),
        ({"a": torch.ones(2, 2)}, r"\['a'\] of a tensor of shape \(2, 2\)"),
        ({"a": "x"}, r"\['a'\] of 'x'"),
        ({"a": 10**400}, r"\['a'\], a number that is too large"),
        ({"a": np.ones(2)}, r"\['a'\] of ndarray"),
    ],
)
@pytest.mark.parametrize("where", ["metrics", "evaluate"])
def test_names_and_numbers_that_no_row_has_are_refused(given: Any, text: str, where: str, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    own = given if where == "metrics" else {"b": 1.0}
    evaluate = (lambda state: given) if where == "evaluate" else None
    run = quiet(lambda state, x: (state, own), 0, batch, log=log, evaluate=evaluate, total=2)
    with pytest.raises((TypeError, ValueError), match=f"loop: got .*{where}") as info:
        run_through(run)
    assert info.match(text)
    assert run.ended == "failed" and rows_of(log) == []


@pytest.mark.parametrize("evaluate", [None, lambda state: {"held out": state * 100.0}])
def test_metrics_that_cannot_be_read_touch_no_row(evaluate: Any, tmp_path: Path) -> None:
    step = lambda state, x: (state + 1, {"loss": float(state), **({"name": "x"} if state == 5 else {})})
    log = tmp_path / "log.csv"
    with pytest.raises(TypeError, match=r"metrics\['name'\]"):
        run_through(quiet(step, 0, batch, every=2, log=log, evaluate=evaluate, evaluate_every=6))
    rows = [row for row in rows_of(log) if row["step"] != "0"]
    assert [(row["step"], row["loss"]) for row in rows] == [("1", "0.0"), ("2", "1.0"), ("4", "3.0")]
    assert evaluate is None or not any(row["held out"] for row in rows)


# ---- rows


@pytest.mark.parametrize("end", ["batches", "asked", "patience", "total"])
def test_the_last_step_has_a_row_whatever_ends_the_loop(end: str, tmp_path: Path) -> None:
    done = [0]

    def step(state: int, x: object) -> Any:
        done[0] += 1
        return counted(state, x)

    options: Any = {
        "batches": {},
        "asked": {"stop": lambda: done[0] == 7},
        "patience": {"patience": 1, "evaluate_every": 7},
        "total": {"total": 7},
    }[end]
    log, around = tmp_path / "log.csv", {"evaluate": lambda state: {"x": 1.0}, "evaluate_every": 5, "every": 5}
    run = run_through(quiet(step, 0, [0] * 7 if end == "batches" else batch, log=log, **(around | options)))
    assert (run.ended, run.done, run.logged["step"], run.logged["loss"]) == (end, 7, 7, 6.0)
    rows = rows_of(log)
    assert [(row["step"], row["loss"]) for row in rows] == [("0", ""), ("1", "0.0"), ("5", "4.0"), ("7", "6.0")]
    assert bool(rows[-1]["x"]) == (end != "asked")


def test_going_back_takes_rows_and_keeps_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(record.time, "perf_counter", lambda: clock[0])
    log, went = tmp_path / "log.csv", False
    run = quiet(counted, 7, batch, after=7, total=20, every=5, log=log)
    for _ in run:
        clock[0] += 2.0
        if run.done == 14 and not went:
            run.state, run.done, went = 7, 7, True
    rows = rows_of(log)
    assert [row["step"] for row in rows] == ["8", "10", "15", "20"]
    assert [float(row["seconds"]) for row in rows] == [2.0] * 4


# ---- files


def wide(step: fz.Step, many: int) -> Any:
    """A step with so many metrics."""
    numbers = {f"number {i}": float(i) for i in range(many)}

    def run(state: Any, x: torch.Tensor) -> Any:
        state, metrics = step(state, x)
        return state, {**metrics, **numbers}

    return run


@contextlib.contextmanager
def full_disk(limit: int) -> Iterator[Any]:
    """Of files that this process writes so many bytes are taken."""
    before, own = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, own[1]))
        with pytest.raises(OSError, match="File too large") as info:
            yield info
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, own)
        signal.signal(signal.SIGXFSZ, before)


def test_a_log_whose_disk_is_full_waits_for_the_last_save(tmp_path: Path) -> None:
    step, kept, log = wide(STEP, 600), fz.Checkpoints(tmp_path / "k"), tmp_path / "log.csv"
    run = quiet(step, begun(), batch, total=9, every=1, log=log, checkpoints=kept)
    with full_disk(20_000) as info:
        run_through(run)
    assert info.value.__context__ is None and run.ended == "failed" and run.done > 1
    assert not [thread for thread in threading.enumerate() if thread.name == "fzero-save"]
    state, after = of_kept(kept)
    assert state.step == run.done
    run_through(quiet(step, state, batch, total=run.done + 2, after=after, every=1, log=log))
    assert [row["step"] for row in rows_of(log)] == [str(n) for n in range(1, run.done + 3) if n != run.done]


def on_a_full_disk(rank: int, folder: str) -> tuple[str, str, int]:
    """Rank 0 writes the log; a row has more bytes than the store of the ranks takes."""
    step = fz.shard_zero3(STEP)
    state = step.init({"w": torch.zeros(4)})
    run = quiet(wide(step, 5_000), state, batch, total=30, every=1, log=f"{folder}/log.csv")
    with full_disk(200_000) as info:
        run_through(run)
    return str(info.value), run.ended, run.done


def test_a_row_that_a_disk_did_not_take_is_named_on_every_rank(tmp_path: Path) -> None:
    said = run_ranks(functools.partial(on_a_full_disk, folder=str(tmp_path)), 2, backend="processes")
    done = said[0][2]
    assert done == said[1][2] > 1 and len(rows_of(tmp_path / "log.csv")) in (done - 1, done)  # a part of the last one
    for rank, (text, ended, _) in enumerate(said):
        assert text.startswith("rank 0: [Errno" if rank else "[Errno") and ended == "failed"
        assert f"File too large, so that the row after step {done} is missing in the log: " in text
        assert str(tmp_path / "log.csv") in text


@pytest.mark.parametrize("device", ["/dev/full", "/dev/zero"])
def test_a_log_on_a_device_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match=f"loop: got log='{device}', a device or a pipe"):
        run_through(quiet(counted, 0, batch, total=3, log=device))


@pytest.mark.parametrize("after", [None, 2])
def test_what_is_no_log_is_left_alone(after: int | None, tmp_path: Path) -> None:
    for name, text in (("notes.csv", "my,data\n1,2\n"), ("text", "something"), ("steps.csv", "step,x\nfirst,2\n")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=f"loop: got log='.*{name}', a file that is no log of a loop"):
            run_through(quiet(counted, 0, batch, total=3, after=after, log=tmp_path / name))
        assert (tmp_path / name).read_text() == text
    with pytest.raises(IsADirectoryError, match=r"loop: got log='.*', a folder, expected the path of a file"):
        run_through(quiet(counted, 0, batch, total=3, after=after, log=tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["notes.csv", "steps.csv", "text"]
    assert not Path(f"{tmp_path}.new").exists()


def test_somebody_elses_file_is_not_written_over(tmp_path: Path) -> None:
    (new := tmp_path / "log.csv.new").write_text("precious")
    with pytest.raises(FileExistsError, match=r"no log of a loop.*the log does not begin: '.*/log\.csv\.new'"):
        run_through(quiet(counted, 0, batch, total=3, log=tmp_path / "log.csv"))
    assert new.read_text() == "precious" and os.listdir(tmp_path) == ["log.csv.new"]


@pytest.mark.parametrize("text", ["", "step,loss,seconds\r\n", "step,loss,seconds\r\n1,0.5"])
def test_a_log_with_no_row_yet_goes_on(text: str, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(text)
    run_through(quiet(counted, 2, batch, total=3, after=2, log=tmp_path / "log.csv"))
    assert [(row["step"], row["loss"]) for row in rows_of(tmp_path / "log.csv")] == [("3", "2.0")]


def test_a_log_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the program goes, and through a link to the file that it leads to; with any name in it."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "real.csv").touch()
    (tmp_path / "link.csv").symlink_to("real.csv")
    monkeypatch.chdir(tmp_path)
    step = lambda state, x: (
        state + 1,
        {"line\u2028one\ntwo": 1.0} if state < 2 else {"line\u2028one\ntwo": 1.0, "b": 2.0},
    )
    for after, total in ((None, 2), (2, 4)):
        for _ in quiet(step, after or 0, batch, after=after, total=total, every=1, log="link.csv"):
            os.chdir("elsewhere") if Path("elsewhere").exists() else None
        os.chdir(tmp_path)
    assert (tmp_path / "link.csv").is_symlink() and not os.listdir("elsewhere")
    assert [row["b"] for row in rows_of(tmp_path / "real.csv")] == ["", "", "2.0", "2.0"]
    assert [row["line\u2028one\ntwo"] for row in rows_of(tmp_path / "real.csv")] == ["1.0"] * 4


def test_checkpoints_and_the_best_ones_want_two_folders(tmp_path: Path) -> None:
    step = fz.train_step(lambda p: p["w"].sum(), fz.sgd(0.1))
    state = step.init({"w": torch.ones(2)})
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    best: Any = {"best": fz.Checkpoints(tmp_path / "link" / "a"), "evaluate": lambda state: {"loss": 1.0}}
    with pytest.raises(ValueError, match="checkpoints= and best= in one folder"):
        quiet(step, state, [()], checkpoints=fz.Checkpoints(tmp_path / "a"), **best)


def test_norms_of_leaves_are_columns(tmp_path: Path) -> None:
    step = fz.train_step(lambda p: p["w"].sum(), fz.adamw(0.1), metrics=("leaf_norms",))
    run_through(quiet(step, step.init({"w": torch.ones(4)}), [()], log=tmp_path / "log.csv"))
    (row,) = rows_of(tmp_path / "log.csv")
    assert float(row["leaf_norms.grads.w"]) == 2.0 and "leaf_norms.moments.nu.w" in row


def test_what_a_killed_loop_has_left_is_written_over(tmp_path: Path) -> None:
    for left in ("", "ste", "step,loss\n", "step,loss,seconds\n1,0.0,1"):
        (tmp_path / "log.csv.new").write_text(left)
        run_through(quiet(counted, 0, batch, log=tmp_path / "log.csv", total=2))
        assert [row["step"] for row in rows_of(tmp_path / "log.csv")] == ["1", "2"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["log.csv"]


def test_a_run_that_goes_on_knows_the_numbers_of_its_first_step(tmp_path: Path) -> None:
    run = quiet(counted, 3, batch, total=6, after=3, log=tmp_path / "log.csv", every=5)
    assert run.logged == {} and next(run) == (4, {"loss": 3.0})
    assert run.logged["loss"] == 3.0 and run.logged["seconds"] > 0
    next(run)
    assert run.logged["loss"] == 4.0
    run.close()
    assert [row["step"] for row in rows_of(tmp_path / "log.csv")] == ["4", "5"]
