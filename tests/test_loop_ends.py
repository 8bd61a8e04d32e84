"""fz.loop as it is left, asked, forked, moved and failed: what came is heard once, and no rank waits for another."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from looping import STEP, batch, begun, counted, of_kept, quiet, run_through

import fzero as fz
from fzero.loops import asked
from fzero.testing import run_ranks

pytestmark = pytest.mark.usefixtures("terminal")


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Signals go where they went before, whatever a test did; the same wish may come again for a moment only."""
    monkeypatch.setattr(asked, "ONE", 0.3)
    before = [signal.getsignal(number) for number in asked.SIGNALS]
    yield
    after = [signal.getsignal(number) for number in asked.SIGNALS]
    for number, handler in zip(asked.SIGNALS, before, strict=True):
        signal.signal(number, handler)
    assert after == before


# ---- signals


@pytest.mark.parametrize("first", [3, 5])
def test_loops_end_in_any_order(first: int) -> None:
    """One that has begun earlier ends earlier: it takes its handler out of the middle."""
    before = signal.getsignal(signal.SIGINT)
    for pair in zip(quiet(counted, 0, batch, total=first), quiet(counted, 0, batch, total=8 - first), strict=False):
        del pair
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_loop_that_is_left_and_closed_within_another() -> None:
    before = signal.getsignal(signal.SIGTERM)
    left, other = quiet(counted, 0, batch), quiet(counted, 0, batch, total=4)
    next(left)
    for state, _ in other:
        left.close() if state == 2 else None
    assert other.ended == "total" and signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_is_put_back_behind_the_loop_passes_signals_on() -> None:
    """As a library does that has set its own one meanwhile; also around a next loop."""
    before = signal.getsignal(signal.SIGINT)
    own = []
    try:
        for state, _ in quiet(counted, 0, batch, total=3):
            own += [signal.signal(signal.SIGINT, signal.default_int_handler)] if state == 1 else []
        signal.signal(signal.SIGINT, *own)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            signal.signal(signal.SIGINT, lambda *args: own[0](*args))
        run = quiet(counted, 0, batch, total=3)
        with pytest.raises(KeyboardInterrupt):
            for _ in run:
                signal.raise_signal(signal.SIGINT)
                time.sleep(0.4)
                signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("inner_total", [5, 2])
def test_a_loop_around_another_hears_the_signal(inner_total: int) -> None:
    outer, taken = quiet(counted, 0, batch, total=5), []
    for state, _ in outer:
        inner = quiet(counted, 0, batch, total=inner_total)
        for own, _ in inner:
            if (state, own) == (2, 2):
                signal.raise_signal(signal.SIGINT)
        taken.append((inner.ended, inner.done))
    assert outer.ended == "asked" and outer.done == 2
    assert taken[1] == ("asked" if inner_total > 2 else "total", 2)


def test_a_second_signal_ends_all_loops_around_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "ONE", -1.0)
    outer, taken = quiet(counted, 0, batch), 0
    with pytest.raises(KeyboardInterrupt):
        for _ in outer:
            for _ in quiet(counted, 0, batch):
                signal.raise_signal(signal.SIGINT)
                taken += 1
                signal.raise_signal(signal.SIGINT)
    outer.close()
    assert taken == 1


class Preempted(Exception):
    pass


@pytest.mark.parametrize("how", ["break", "return", "yield from"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_a_loop_is_left_is_not_lost(how: str, number: int) -> None:
    def preempted(*_: object) -> None:
        raise Preempted

    before = signal.signal(number, preempted)

    def passed_on() -> Iterator[Any]:
        yield from quiet(counted, 0, batch)

    def left() -> None:
        for _ in passed_on() if how == "yield from" else quiet(counted, 0, batch):
            signal.raise_signal(number)
            if how == "return":
                return
            break

    try:
        with pytest.raises(Preempted):
            left()
            time.sleep(5)
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("end", ["total", "batches", "patience"])
def test_a_signal_that_comes_as_a_loop_ends_anyway_is_the_programs(end: str, tmp_path: Path) -> None:
    options: Any = {"total": 3} if end == "total" else {}
    if end == "patience":
        options = {"evaluate": lambda state: {"x": 1.0}, "evaluate_every": 1, "patience": 3}
    kept = fz.Checkpoints(tmp_path)
    run = quiet(STEP, begun(), [batch(0)] * 3 if end == "batches" else batch, checkpoints=kept, **options)
    with pytest.raises(KeyboardInterrupt):
        for _ in run:
            if run.done == 3 and end != "batches":
                signal.raise_signal(signal.SIGINT)
            if run.done == 3 and end == "batches":
                run._batches = lambda number: signal.raise_signal(signal.SIGINT) or next(iter([]))
    assert (run.ended, run.done) == (end, 3) and of_kept(kept)[0].step == 3


def test_the_same_wish_may_come_again_also_as_the_loop_has_ended() -> None:
    """A terminal sends Ctrl-C to all processes, and torchrun sends it on."""
    run = quiet(counted, 0, batch)
    again = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    for _ in run:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        again.start()
    again.join()
    assert run.ended == "asked"


def test_a_loop_that_another_thread_lets_go_hears_nothing_any_more() -> None:
    before = [signal.getsignal(number) for number in asked.SIGNALS]
    held = [quiet(counted, 0, batch)]
    next(held[0])
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    gc.collect()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    run_through(quiet(counted, 0, batch, total=1))
    assert [signal.getsignal(number) for number in asked.SIGNALS] == before


def test_a_forked_process_ends_by_a_signal_and_leaves_the_loop_alone(tmp_path: Path) -> None:
    kept = fz.Checkpoints(tmp_path / "kept")
    run = quiet(STEP, begun(), batch, total=3, log=tmp_path / "log.csv", every=1, checkpoints=kept, save_every=1)
    for _ in run:
        if run.done == 2:
            child = os.fork()
            if not child:
                try:
                    run.close()
                    time.sleep(20)
                finally:
                    os._exit(1)
            time.sleep(0.1)
            os.kill(child, signal.SIGTERM)
            assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    assert (run.ended, of_kept(kept)[0].step) == ("total", 3)
    assert (tmp_path / "log.csv").read_text().count("\n") == 4


# ---- what is let go, moved and kept


def test_what_gives_batches_is_let_go_as_the_loop_ends() -> None:
    closed = []

    def batches() -> Iterator[torch.Tensor]:
        try:
            while True:
                yield batch(0)
        finally:
            closed.append(True)

    for leave in (False, True):
        run = quiet(counted, 0, batches(), total=3)
        for _ in run:
            if leave:
                break
        run.close() if leave else None
        assert closed == [True] * (1 + leave)
    mine = batches()  # one that somebody else has goes on
    run_through(quiet(counted, 0, mine, total=1))
    assert len(closed) == 2 and next(mine) is not None


def test_a_run_that_went_back_saves_its_own_line(tmp_path: Path) -> None:
    kept, moved = fz.Checkpoints(tmp_path), [0]
    run = quiet(
        STEP, begun(), lambda n: batch(n + moved[0]), checkpoints=kept, save_every=5, stop=lambda: run.done >= 5 + went
    )
    went, early = 9, begun()
    for state, _ in run:
        early = state if run.done == 3 else early
        if run.done == 7 and not moved[0]:
            run.state, run.done, moved[0], went = early, 3, 100, 0
    state, extra = of_kept(kept)
    assert (run.ended, run.done, extra["loop"]["done"], state.step) == ("asked", 5, 5, 5)
    assert torch.equal(state.params["w"], run.state.params["w"])


def test_the_best_state_is_the_one_that_was_evaluated(tmp_path: Path) -> None:
    best = fz.Checkpoints(tmp_path, keep=1)
    run = quiet(STEP, begun(), batch, total=20, evaluate=lambda s: {"x": -s.step}, evaluate_every=5, best=best)
    values = {}
    for state, _ in run:
        values[run.done] = state.params["w"].item()
        if run.done == 10:
            run.state = begun()
            break
    run.close()
    found, extra = of_kept(best)
    assert (found.step, extra["loop"]["best"], found.params["w"].item()) == (10, -10.0, values[10])


def test_a_run_of_no_steps_is_saved(tmp_path: Path) -> None:
    kept = fz.Checkpoints(tmp_path)
    assert [*quiet(STEP, begun(), batch, total=0, checkpoints=kept)] == []
    state, after = of_kept(kept)
    assert [*quiet(STEP, state, batch, total=0, after=after, checkpoints=kept)] == []
    assert len(os.listdir(tmp_path)) == 1


# ---- what fails


def once(value: object, count: int) -> Callable[..., Any]:
    values = iter([value] * count)
    return lambda *_: next(values)


@pytest.mark.parametrize("what", ["step", "evaluate", "stop", "extra"])
def test_a_stop_iteration_is_no_end(what: str, tmp_path: Path) -> None:
    options: Any = {"evaluate": once({"x": 1.0}, 2), "evaluate_every": 1} if what == "evaluate" else {}
    if what in ("stop", "extra"):
        options[what] = once(False, 1) if what == "stop" else once({}, 1)
    step = counted if what == "step" else STEP
    if what == "step":
        step, failing = (lambda state, x: failing()), once((0, {}), 1)
    elif what != "evaluate":
        options |= {"checkpoints": fz.Checkpoints(tmp_path), "save_every": 1}
    run = quiet(step, begun(), batch, total=9, **options)
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        run_through(run)
    assert run.ended == "failed" and isinstance(run.done, int) and run.done in (1, 2)


@pytest.mark.parametrize("given", [0, (0, {}, 1), {"a": 1, "b": 2}, (0, [1])])
def test_a_step_gives_a_state_and_metrics(given: Any) -> None:
    with pytest.raises(TypeError, match=r"loop: step gave .*, expected \(state, metrics\)"):
        next(quiet(lambda state, x: given, 0, batch))


@pytest.mark.parametrize("name", ["total", "every", "evaluate_every", "after", "evaluate", "checkpoints"])
def test_ranks_that_are_told_different_things_are_refused(name: str, tmp_path: Path) -> None:
    def rank_main(rank: int) -> str:
        step, others = fz.shard_zero1(STEP), {"evaluate": lambda state: {"x": 1.0}, "checkpoints": None}
        own: Any = {"evaluate": None, "checkpoints": fz.Checkpoints(tmp_path)}.get(name, 7)
        options = {"evaluate": others["evaluate"], name: own if rank else others.get(name, 4)}
        with pytest.raises(ValueError, match="on this rank and others on another") as info:
            next(quiet(step, step.init({"w": torch.zeros(2)}), batch, **options))
        return str(info.value)

    assert len({*run_ranks(rank_main, 2)}) == 2


def test_what_a_loop_does_not_keep_is_refused_at_the_call(tmp_path: Path) -> None:
    states = fz.stack([begun(), begun()])
    for name in ("checkpoints", "best"):
        with pytest.raises(ValueError, match=rf"loop: got {name}=fz.Checkpoints\(...\) and a state.* 'w' .* ensemble"):
            fz.loop(
                torch.vmap(STEP),
                states,
                batch,
                evaluate=lambda _: {"x": 1.0},
                **{name: fz.Checkpoints(tmp_path)},  # type: ignore[arg-type]
            )
    with pytest.raises(TypeError, match=r"a list \[batch\] has it"):
        fz.loop(counted, 0, (batch(0), batch(1)))
    run = quiet(counted, 0, batch)
    with pytest.raises(ValueError, match=r"loop: got done=-1, expected at least 0"):
        run.done = -1
        next(run)
