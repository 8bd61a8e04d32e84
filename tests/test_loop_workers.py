"""fz.loop where the signal that asks it to end reaches those who make its batches, too: they fail as it is asked."""

from __future__ import annotations

import functools
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from looping import STEP, begun, of_kept, quiet, run_through
from nightly import at_length

import fzero as fz
from fzero.loops import asked
from fzero.testing import run_ranks

pytestmark = pytest.mark.usefixtures("terminal")
DEAD = "DataLoader worker (pid 1) is killed"


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((2,), float(number))

    def __len__(self) -> int:
        return 400


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same wish may come again for a moment only."""
    monkeypatch.setattr(asked, "ONE", 0.05)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, "stop"])
@pytest.mark.parametrize("what", ["batches", "evaluate"])
def test_what_fails_as_the_loop_is_asked_to_end_is_a_warning(how: Any, what: str, tmp_path: Path) -> None:
    kept, wishes = fz.Checkpoints(tmp_path), list[bool]()

    def dies(done: int) -> None:
        if done == 3:
            signal.raise_signal(how) if how != "stop" else wishes.append(True)
            raise RuntimeError(DEAD)

    def batches(done: int) -> torch.Tensor:
        dies(done) if what == "batches" else None
        return torch.ones(1)

    def evaluate(state: fz.TrainState) -> dict[str, float]:
        dies(state.step)
        return {"x": 1.0}

    options: Any = {"evaluate": evaluate, "evaluate_every": 1} if what == "evaluate" else {}
    options |= {"stop": lambda: bool(wishes)} if how == "stop" else {}
    run = quiet(STEP, begun(), batches, total=9, checkpoints=kept, **options)
    with pytest.warns(RuntimeWarning, match=rf"loop: {what} raised RuntimeError\('DataLoader worker .*ends as asked"):
        assert len(list(run)) == 3
    assert (run.ended, run.done, of_kept(kept)[0].step) == ("asked", 3, 3)


def test_a_death_is_not_heard_behind_the_signal() -> None:
    """torch's handler raises in whatever the program does as a worker has died, also in a step or a save."""

    def handler(*_: object) -> None:
        raise RuntimeError(DEAD)

    def step(state: int, _: object) -> tuple[int, dict[str, float]]:
        if state == 2:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGCHLD)
        return state + 1, {}

    before = signal.signal(signal.SIGCHLD, handler)
    try:
        outer = quiet(lambda state, x: (state, {}), 0, lambda number: number)
        for _ in outer:
            run = quiet(step, 0, lambda number: number)
            list(run)
            signal.raise_signal(signal.SIGCHLD)  # the outer one still waits
        assert (run.ended, run.done, outer.ended, outer.done) == ("asked", 3, "asked", 1)
        assert signal.getsignal(signal.SIGCHLD) is handler
    finally:
        signal.signal(signal.SIGCHLD, before)


def workers_die(where: str, folder: Path) -> tuple[str, int, int, list[str]]:
    """A signal to the process and to the worker of its DataLoader, in a step or as a batch is taken."""
    kept = fz.Checkpoints(folder)
    loader: Any = torch.utils.data.DataLoader(Numbers(), num_workers=1, batch_size=None, multiprocessing_context="fork")
    given: Any = iter(loader)

    def dies() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        for child in given._workers:
            os.kill(child.pid, signal.SIGTERM)
            child.join()

    def batches(number: int) -> Any:
        dies() if where == "batches" and number == 3 else None
        return next(given)

    def step(state: fz.TrainState, x: torch.Tensor) -> Any:
        dies() if where == "step" and state.step == 2 else None
        return STEP(state, x)

    run = quiet(step, STEP.init({"w": torch.zeros(2)}), batches, checkpoints=kept, total=300)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run_through(run)
        loader = given = None
    return run.ended, run.done, of_kept(kept)[0].step, [str(each.message)[:21] for each in said]


@pytest.mark.parametrize("where", ["step", "batches"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_that_have_the_signal_too_tear_no_step(where: str, tmp_path: Path) -> None:
    ended, done, saved, said = workers_die(where, tmp_path)
    assert ended == "asked" and done == saved
    assert done == 3 or (where == "batches" and done == 4)  # with the batch that a worker had made before
    assert where == "batches" or not [text for text in said if text.startswith("loop")]


def one_is_asked(rank: int, folder: str) -> tuple[str, int, int]:
    """Rank 1 has the signal, batches fail on rank 0, whose workers had it first."""
    asked.ONE = 0.05
    kept, step = fz.Checkpoints(folder), fz.shard_zero1(STEP)

    def batches(number: int) -> torch.Tensor:
        if number == 3 and rank == 1:
            signal.raise_signal(signal.SIGTERM)
        if number == 3 and rank == 0:
            raise RuntimeError(DEAD)
        return torch.ones(2)

    run = quiet(step, step.init({"w": torch.zeros(2)}), batches, checkpoints=kept, total=300)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            run_through(run)
        finally:
            asked.ONE = 1.0
    return run.ended, of_kept(kept, step)[0].step, len([each for each in said if DEAD in str(each.message)])


@at_length  # a signal that comes late on a busy machine ends a process that other tests share
def test_all_ranks_end_as_asked_where_batches_fail_on_one_that_was_not(tmp_path: Path) -> None:
    said = run_ranks(functools.partial(one_is_asked, folder=str(tmp_path)), 2, backend="processes")
    assert said == [("asked", 3, 1), ("asked", 3, 0)]


@pytest.mark.parametrize("judged", ["best", "patience"])
def test_an_evaluation_that_judges_gives_a_number(judged: str, tmp_path: Path) -> None:
    options: Any = {"best": fz.Checkpoints(tmp_path)} if judged == "best" else {"patience": 2}
    run = quiet(STEP, begun(), lambda n: torch.ones(1), evaluate=lambda _: {}, **options)
    with pytest.raises(ValueError, match=r"loop: got patience or best, and evaluate gave \{\}, expected at least one"):
        next(run)
    assert run.ended == "failed"
