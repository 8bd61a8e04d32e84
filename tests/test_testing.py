"""fzero.testing itself: asserts name the leaf, ranks fail at once."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import fzero as fz
from fzero import testing as t
from fzero.testing import _ranks, strategies


def test_asserts_name_the_leaf() -> None:
    a = {"x": [torch.ones(2), torch.zeros(1)]}
    b = {"x": [torch.ones(2), torch.full((1,), 1e-3)]}
    with pytest.raises(AssertionError, match=r"leaf 'x\.1': largest difference 1\.000e-03"):
        t.assert_trees_close(a, b)
    t.assert_trees_close(a, b, atol=1e-2)
    with pytest.raises(AssertionError, match=r"leaf 'x\.1': the bits differ"):
        t.assert_trees_equal(a, b)
    with pytest.raises(AssertionError, match=r"leaf 'x\.0': torch\.float32"):
        t.assert_trees_equal(a, {"x": [torch.ones(2).half(), torch.zeros(1)]})
    with pytest.raises(AssertionError, match=r"differ in structure"):
        t.assert_trees_equal(a, {"x": [torch.ones(2)]})
    with pytest.raises(AssertionError, match=r"leaf 'x\.0': .*float64.* differ"):
        t.assert_same_spec(a, {"x": [torch.ones(2).double(), torch.zeros(1)]})
    with pytest.raises(AssertionError, match=r"leaf 'x\.1': 1 values are not finite"):
        t.assert_all_finite({"x": [torch.ones(2), torch.tensor([float("nan")])]})
    with pytest.raises(AssertionError, match=r"leaf 'x\.0': shapes"):
        t.assert_trees_close(a, {"x": [torch.ones(3), torch.zeros(1)]})
    nan = torch.tensor([float("nan"), 0.0])
    t.assert_trees_equal(nan, nan.clone())
    with pytest.raises(AssertionError, match="the bits differ"):
        t.assert_trees_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    with pytest.raises(AssertionError):
        t.assert_trees_close(nan, torch.zeros(2))


def test_mutation_and_aliases() -> None:
    x = torch.ones(2)
    with pytest.raises(AssertionError, match=r"leaf '0': the bits differ"):
        t.assert_not_mutated(lambda y: y.add_(1), x)
    with pytest.raises(AssertionError, match=r"leaf 'b' shares its memory with 'a'"):
        t.assert_no_alias({"a": x}, {"b": x[:1]})


def test_collectives_are_counted() -> None:
    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(lambda p: p["w"].sum(), fz.sgd(0.1)))
        state = step.init({"w": torch.ones(3)})
        t.assert_collectives(lambda: fz.gather(state.params), {"all_gather": 1, "reduce_scatter": 0})
        with pytest.raises(AssertionError, match=r"all_gather: 1, expected 2\. In order: \[\('all_gather', .gather of"):
            t.assert_collectives(lambda: fz.gather(state.params), {"all_gather": 2})

    t.run_ranks(rank_main, 2)


def fail_on_one(rank: int) -> int:
    if rank == 1:
        raise ValueError("this rank is broken")
    torch.distributed.barrier()
    return rank


def double(rank: int) -> int:
    return 2 * rank


def leave_on_one(rank: int) -> int:
    if rank == 1:
        sys.exit("enough")
    return rank


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_failing_rank_fails_at_once_and_is_named(backend: str) -> None:
    """Not one that lost its connection to it; leaving counts as failing."""
    assert t.run_ranks(double, 2, backend=backend) == [0, 2]
    start = time.perf_counter()
    for _ in range(3):
        with pytest.raises(t.RankError, match=r"(?s)rank 1 of 2 failed:.*this rank is broken") as caught:
            t.run_ranks(fail_on_one, 2, backend=backend)
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("in fail_on_one") == 1
    with pytest.raises(t.RankError, match=r"(?s)rank 1 of 2 failed:.*SystemExit: enough"):
        t.run_ranks(leave_on_one, 2, backend=backend)
    assert time.perf_counter() - start < 20
    assert t.run_ranks(double, 2, backend=backend) == [0, 2]


def test_processes_that_are_there_find_modules_of_a_folder_that_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    t.run_ranks(abs, 2, backend="processes")
    (tmp_path / "made_for_ranks.py").write_text("def doubled(rank):\n    return 2 * rank\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert t.run_ranks(importlib.import_module("made_for_ranks").doubled, 2, backend="processes") == [0, 2]


def test_processes_that_die_as_they_begin_are_told_of() -> None:
    """As where the program that they import calls run_ranks itself."""
    pool = _ranks._Pool(1)
    pool.processes[0].kill()
    pool.processes[0].join()
    with pytest.raises(t.RankError, match=r"(?s)rank 0 of 1 failed:.*process died.*`if __name__ == '__main__':`"):
        pool.run(double, 1, 5.0, _ranks._Around(True, None, False))


def read_by_nobody() -> None:
    if multiprocessing.parent_process() is None:
        raise ZeroDivisionError


class Unread:
    def __reduce__(self) -> Any:
        return read_by_nobody, ()


def unread(rank: int) -> Any:
    return Unread()


def test_what_ranks_still_answer_is_not_taken_for_a_later_run() -> None:
    with pytest.raises(ZeroDivisionError):  # as an interrupt, it ends the call before all have answered
        t.run_ranks(unread, 2, backend="processes")
    assert t.run_ranks(double, 2, backend="processes") == [0, 2]


def test_run_ranks_arguments() -> None:
    with pytest.raises(ValueError, match=r"got world_size=0"):
        t.run_ranks(double, 0)
    with pytest.raises(ValueError, match=r"got backend='mpi'"):
        t.run_ranks(double, 1, backend="mpi")
    with pytest.raises(TypeError, match=r"cannot be pickled.*top of a module"):
        t.run_ranks(lambda rank: rank, 1, backend="processes")
    with pytest.raises(t.RankError, match=r"did not finish within 0\.2 seconds"):
        t.run_ranks(lambda rank: time.sleep(1), 1, timeout=0.2)


def test_a_rank_that_comes_late_has_no_part_in_the_next_run() -> None:
    """On threads the collectives of all runs go by the same names."""
    woken: list[int] = []
    before = threading.active_count()

    def late(rank: int) -> None:
        time.sleep(1.0)  # on a busy machine, too, the run has ended before
        woken.append(rank)
        dist.all_reduce(torch.zeros(2))

    def next_one(rank: int) -> float:
        for _ in range(300):  # longer than the late ones sleep
            total = torch.ones(2)
            dist.all_reduce(total)
            time.sleep(0.004)
        return float(total[0])

    with pytest.raises(t.RankError, match=r"ranks \[0, 1\] did not finish"):
        t.run_ranks(late, 2, timeout=0.1)
    assert t.run_ranks(next_one, 2, timeout=20.0) == [2.0, 2.0]
    assert woken == [] and threading.active_count() <= before


def test_ranks_on_threads_leave_no_hook() -> None:
    before = sys.excepthook
    t.run_ranks(lambda rank: None, 2)
    assert sys.excepthook is before
    with t.fake_mesh({"dp": 2}):
        pass
    assert sys.excepthook is before


@given(st.data())
def test_transforms_without_a_memory_offload_nothing(data: st.DataObject) -> None:
    assert not any("offload" in name for name, _ in data.draw(strategies.transforms(memories=())))


def _warned(rank: int) -> int:
    warnings.warn("of the caller's code", FutureWarning, stacklevel=1)
    return rank


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_ranks_treat_warnings_as_their_caller_does(backend: str) -> None:
    with pytest.raises(t.RankError, match="FutureWarning: of the caller's code"):  # pytest's filters
        t.run_ranks(_warned, 2, backend=backend)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "of the caller's", FutureWarning)
        assert t.run_ranks(_warned, 2, backend=backend) == [0, 1]
