"""fz.loop beside the same loop by hand: any end on any rank, any place to leave it, and to the bit what goes on."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import importlib
import itertools
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scenarios
import torch
from dispositions import as_in_a_terminal
from exactness import SHARDS
from hypothesis import given
from hypothesis import strategies as st
from looping import counted, of_kept, quiet, rows_of, run_through
from nightly import by_day, by_turns

import fzero as fz
from fzero.loops import asked, record
from fzero.testing import assert_trees_equal, run_ranks

LOSS, PARAMS = scenarios.stack()
pytestmark = pytest.mark.usefixtures("terminal")


def step_of(ranks: int, stage: int = 3) -> fz.Step:
    optimizer = fz.chain(fz.clip_by_global_norm(1.0), fz.adamw(fz.linear(1e-2, 1e-3, 9)))
    return SHARDS[stage if ranks > 1 else 0](fz.train_step(LOSS, optimizer))


def batch(number: int, rank: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return tuple(torch.randn(3, width, dtype=torch.float64, generator=generator) for width in (5, 2))


def by_hand(step: fz.Step, steps: int, rank: int) -> tuple[fz.TrainState, list[float]]:
    state, losses = step.init(PARAMS), []
    for number in range(steps):
        state, metrics = step(state, *batch(number, rank))
        losses.append(metrics["loss"].item())
    return state, losses


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Signals go where they went before, and no thread or file is left."""
    before = [signal.getsignal(number) for number in asked.SIGNALS]
    threads = set(threading.enumerate())
    files = set(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert [signal.getsignal(number) for number in asked.SIGNALS] == before
    assert threads.issuperset(threading.enumerate())
    assert len(os.listdir("/proc/self/fd")) <= len(files)


# ---- the same as by hand


def run_in_parts(rank: int, ranks: int, stage: int, parts: tuple[int, ...], options: Any, folder: str) -> Any:
    """A run that is stopped after each of these numbers of steps, on all ranks as one says so, and then goes on."""
    step, kept = step_of(ranks, stage), fz.Checkpoints(f"{folder}/kept")
    losses = list[float]()
    for part in parts:
        state, after = kept.restore(step) or (step.init(PARAMS), None)
        losses = list(after["losses"]) if after is not None else losses
        until = len(losses) + part
        run = quiet(
            step,
            state,
            lambda number: batch(number, rank),
            total=sum(parts),
            after=after,
            log=f"{folder}/log.csv",
            evaluate=lambda state: {"norm": fz.global_norm(state.params)},
            checkpoints=kept,
            extra=lambda: {"losses": losses},
            stop=lambda: rank == ranks - 1 and len(losses) >= until,
            **options,
        )
        for state, metrics in run:  # noqa: B007 - it is looked at afterwards
            losses.append(metrics["loss"].item())
        assert run.done == len(losses) == until and state is run.state
        assert run.ended == ("total" if until == sum(parts) else "asked")
    return fz.gather(state.params), losses, run.logged


def check_parts(ranks: int, stage: int, parts: tuple[int, ...], options: dict[str, Any], backend: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fn = functools.partial(run_in_parts, ranks=ranks, stage=stage, parts=parts, options=options, folder=folder)
        got = run_ranks(fn, ranks, backend=backend)
        rows = rows_of(Path(folder) / "log.csv")
    total = sum(parts)

    def rank_main(rank: int) -> Any:
        state, losses = by_hand(step_of(ranks, stage), total, rank)
        return fz.gather(state.params), losses

    expected = run_ranks(rank_main, ranks)
    for (params, losses, _), (other, others) in zip(got, expected, strict=True):
        assert_trees_equal(params, other)
        assert losses == others
    steps, ends = [int(row["step"]) for row in rows], [*itertools.accumulate(parts)]
    every, looks = options["every"], options["evaluate_every"]
    evaluated = {0, *range(looks, total + 1, looks), total}
    begins = {end + 1 for end in (0, *ends) if end < total}
    assert steps == sorted({*range(every, total + 1, every), *begins, *{*ends} - {0}, *evaluated})
    for row in rows:
        assert bool(row["norm"]) == (int(row["step"]) in evaluated)
        assert row.get("loss", "") == (repr(expected[0][1][int(row["step"]) - 1]) if row["step"] != "0" else "")


drawn = {
    "parts": st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple),
    "options": st.fixed_dictionaries(
        {"every": st.integers(1, 4), "evaluate_every": st.integers(1, 4), "save_every": st.integers(1, 4)}
    ),
}


@by_day(6)
@given(ranks=st.integers(1, 3), stage=st.integers(1, 3), **drawn)
def test_a_run_in_parts_is_the_whole_run_by_hand(ranks: int, stage: int, parts: Any, options: Any) -> None:
    check_parts(ranks, stage, parts, options, "threads")


@by_day(2)
@given(ranks=st.just(2), stage=st.integers(1, 3), seed=st.integers(0, 9), **drawn)
def test_a_run_in_parts_on_processes(ranks: int, stage: int, seed: int, parts: Any, options: Any) -> None:
    with fz.testing.hazards(seed):
        check_parts(ranks, stage, parts, options, "processes")


# ---- all ranks take the same number of steps


@by_day(10)
@given(counts=st.lists(st.integers(0, 4), min_size=2, max_size=4), form=st.sampled_from(["list", "generator"]))
def test_batches_that_end_on_one_rank_end_all(counts: list[int], form: str) -> None:
    ranks = len(counts)

    def rank_main(rank: int) -> Any:
        step, own = step_of(ranks), [batch(number, rank) for number in range(counts[rank])]
        run = quiet(step, step.init(PARAMS), own if form == "list" else (each for each in own))
        losses = [metrics["loss"].item() for _, metrics in run]
        return run.ended, run.done, losses

    expected = run_ranks(lambda rank: by_hand(step_of(ranks), min(counts), rank)[1], ranks)
    assert run_ranks(rank_main, ranks) == [("batches", min(counts), losses) for losses in expected]


@pytest.mark.parametrize(
    ("what", "at"),
    [*itertools.product(["batches", "stop"], [0, 2]), ("log", 0), ("extra", 4), ("evaluate", 2), ("no metrics", 2)],
)
def test_what_fails_on_one_rank_is_raised_on_all(what: str, at: int, tmp_path: Path) -> None:
    def rank_main(rank: int) -> str:
        def fails(own: str, done: int) -> None:
            if (own, rank, done) == (what, 1, at):
                raise OSError("no more disk")

        def evaluate(state: fz.TrainState) -> Any:
            fails("evaluate", state.step)
            return None if (what, rank, state.step) == ("no metrics", 1, at) else {"x": 1.0}

        step, log, kept = step_of(2), tmp_path / "log.csv", fz.Checkpoints(tmp_path / "kept")
        (tmp_path / "log.csv.new").mkdir(exist_ok=True) if what == "log" else None
        run = quiet(
            step,
            step.init(PARAMS),
            lambda number: fails("batches", number) or batch(number, rank),
            total=4,
            stop=lambda: bool(fails("stop", run.done)),
            log=log,
            checkpoints=kept,
            extra=lambda: fails("extra", run.done) or {},
            evaluate=evaluate,
            evaluate_every=1,
        )
        with pytest.raises(TypeError if what == "no metrics" else OSError) as info:
            run_through(run)
        assert (run.ended, run.done) == ("failed", at)
        found = kept.restore(step)
        assert (found[0].step if found is not None else 0) == (0 if what == "extra" else at)
        return str(info.value)

    said = run_ranks(rank_main, 2)
    assert said[0] != said[1] and any("rank " in text for text in said), said


SIGNALS = [(signal.SIGTERM, 3, [1]), (signal.SIGINT, 4, [1]), (signal.SIGTERM, 3, [0, 1])]


def some_are_asked(rank: int, folder: str) -> Any:
    """Some ranks get a signal in the body of a loop, the second a moment after the first; the others hear of none."""
    out = []
    for number, at, ranks in SIGNALS:
        step, kept = step_of(2), fz.Checkpoints(f"{folder}/{len(out)}")
        with as_in_a_terminal(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(asked, "ONE", 0.3)
            before = signal.getsignal(number)
            run = quiet(step, step.init(PARAMS), lambda n: batch(n, rank), total=50, checkpoints=kept, save_every=2)
            for _ in run:
                if run.done == at and rank == ranks[0]:
                    os.kill(os.getpid(), number)
                if run.done == at and rank in ranks[1:]:
                    threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
            time.sleep(0.2)
            assert signal.getsignal(number) == before
        state, extra = of_kept(kept, step)
        out.append((run.ended, run.done, state.step, extra["loop"]["done"]))
    return out


def test_a_signal_that_some_processes_get_ends_all_with_a_checkpoint(tmp_path: Path) -> None:
    found = run_ranks(functools.partial(some_are_asked, folder=str(tmp_path)), 2, backend="processes")
    assert found == [[("asked", at, at, at) for _, at, _ in SIGNALS]] * 2


def test_an_evaluation_is_the_mean_over_ranks() -> None:
    """With dropout off under ZeRO-3, of shares of different sizes: that of plain torch over all examples."""
    net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2)).double()
    apply, params = fz.functional(net)
    step = fz.shard_zero3(fz.train_step(lambda p, x, y: (apply(p, x) - y).square().mean(), fz.sgd(0.1)))
    held = fz.with_fn(step, lambda p, x, y: (apply.eval(p, x) - y).square().mean(-1).sum())
    shares = [[torch.cat([a, b][: n + 1]) for a, b in zip(batch(7), batch(8), strict=True)] for n in range(2)]

    def rank_main(rank: int) -> Any:
        def evaluate(state: fz.TrainState) -> dict[str, Any]:
            x, y = shares[rank]
            both = torch.stack([held.forward(state, x, y), torch.tensor(len(x)).double()])
            total, count = fz.parallel.sum(both, fz.parallel.axis(None, "dp"))
            return {"held out": total / count, "rank": rank}

        run = quiet(step, step.init(params), [batch(0, rank)], evaluate=evaluate)
        state = [state for state, _ in run][-1]
        return fz.gather(state.params), run.logged

    (after, logged), other = run_ranks(rank_main, 2)
    x, y = map(torch.cat, zip(*shares, strict=True))
    with torch.no_grad():
        want = (torch.func.functional_call(net.eval(), dict(after), x) - y).square().mean()
    assert logged["held out"] == pytest.approx(want.item(), rel=1e-12)
    assert logged["rank"] == 0.5
    assert repr(logged["held out"]) == repr(other[1]["held out"])


def on_a_grid(rank: int) -> tuple[float, str]:
    """Two states, one over each axis of a mesh: no rank shares an axis with all others."""
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    steps = [fz.shard_zero1(step_of(0), mesh=mesh, axis=name) for name in ("rows", "columns")]

    def batches(number: int) -> Any:
        if (rank, number) == (3, 1):
            raise OSError("no more disk")
        return batch(number)

    def step(states: Any, *inputs: torch.Tensor) -> Any:
        return tuple(own(state, *inputs)[0] for own, state in zip(steps, states, strict=True)), {}

    states = tuple(own.init(PARAMS) for own in steps)
    run = quiet(step, states, batches, evaluate=lambda _: {"x": rank}, evaluate_every=1)
    with pytest.raises(OSError) as info:
        run_through(run)
    return run.logged["x"], str(info.value)


def test_an_evaluation_and_an_error_reach_ranks_that_share_no_axis() -> None:
    means, said = zip(*run_ranks(on_a_grid, 4, backend="processes", timeout=60), strict=True)
    assert means == (1.5,) * 4
    assert said[3] == "no more disk" and all("rank" in text and "no more disk" in text for text in said[:3])


def test_evaluations_of_other_names_on_another_rank_are_told() -> None:
    def rank_main(rank: int) -> None:
        step = step_of(2)
        with pytest.raises(ValueError, match="and other names"):
            next(quiet(step, step.init(PARAMS), [batch(0)], evaluate=lambda state: {"a" if rank else "x": 1}))

    run_ranks(rank_main, 2)


# ---- signals


def test_a_second_signal_is_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "ONE", -1.0)
    step = step_of(1)
    with nothing_left():
        run, seen = quiet(step, step.init(PARAMS), batch), []
        with pytest.raises(KeyboardInterrupt):
            for state, _ in run:
                seen.append(state)
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
        assert seen == [run.state]
        run.close()


@pytest.mark.parametrize("ignored", asked.SIGNALS)
def test_what_is_ignored_stays_so_and_the_other_signal_ends_it(ignored: int, tmp_path: Path) -> None:
    step, kept = step_of(1), fz.Checkpoints(tmp_path)
    other = next(number for number in asked.SIGNALS if number != ignored)
    signal.signal(ignored, signal.SIG_IGN)
    with nothing_left():
        for total, ended in ((3, "total"), (9, "asked")):
            run = quiet(step, step.init(PARAMS), batch, total=total, checkpoints=kept)
            for _ in run:
                assert signal.getsignal(ignored) == signal.SIG_IGN
                signal.raise_signal(ignored)
                if run.done == 4:
                    signal.raise_signal(other)
                    signal.raise_signal(ignored)
            assert (run.ended, run.done, of_kept(kept, step)[0].step) == (ended, *[min(total, 4)] * 2)
        for _ in (run := quiet(step, step.init(PARAMS), batch, total=3)):
            break  # what is left early sends nothing again
        run.close()


def test_threads_have_no_handlers() -> None:
    step = step_of(1)
    handler = signal.getsignal(signal.SIGINT)

    def other() -> None:
        for _ in quiet(step, step.init(PARAMS), batch, total=1):
            assert signal.getsignal(signal.SIGINT) == handler

    run_ranks(lambda rank: other(), 1)


# ---- leaving it


@pytest.mark.parametrize(("at", "how"), by_turns([1, 4], ["break", "return", "raise", "close", "step", "drop"]))
def test_it_may_be_left_anywhere(at: int, how: str, tmp_path: Path) -> None:
    step, kept = step_of(1), fz.Checkpoints(tmp_path / "kept")

    def failing(state: Any, *inputs: Any) -> Any:
        if how == "step" and state.step == at:
            raise ZeroDivisionError
        return step(state, *inputs)

    def run() -> Any:
        steps = quiet(
            failing,
            step.init(PARAMS),
            batch,
            total=9,
            log=tmp_path / "log.csv",
            every=1,
            checkpoints=kept,
            save_every=1,
        )
        for state, _ in steps:
            if state.step == at:
                if how == "break":
                    break
                if how == "return":
                    return None
                if how == "raise":
                    raise ZeroDivisionError
                if how == "close":
                    steps.close()
        assert steps.ended == ("left" if how != "drop" else "total") or how == "break"
        return None

    with nothing_left():
        if how in ("raise", "step"):
            with pytest.raises(ZeroDivisionError):
                run()
        else:
            run()
    last = 9 if how == "drop" else at
    assert [row["step"] for row in rows_of(tmp_path / "log.csv")] == [str(n) for n in range(1, last + 1)]
    found = kept.restore(step)
    assert (found[0].step if found is not None else 0) == (9 if how == "drop" else at - (how != "step"))


# ---- what it writes


def test_a_log_is_read_by_numpy_and_cut_where_a_run_goes_on(tmp_path: Path) -> None:
    step, log = step_of(1), tmp_path / "new" / "log.csv"

    def run(after: int | None, total: int, **options: Any) -> None:
        run_through(quiet(step, step.init(PARAMS), batch, after=after, total=total, log=log, every=2, **options))

    run(None, 7)
    with log.open("a") as file:
        file.write("8,0.5,0")  # a run that was killed as it wrote
    run(4, 6)
    table = np.genfromtxt(log, delimiter=",", names=True)
    assert table["step"].tolist() == [1, 2, 4, 5, 6]
    assert {"step", "loss", "grad_norm", "lr", "skipped", "seconds"} == {*(table.dtype.names or ())}
    assert np.isfinite(table["loss"]).all() and (table["seconds"] > 0).all() and (table["skipped"] == 0).all()
    run(4, 6, evaluate=lambda state: {"x": 1.0}, evaluate_every=1)
    assert [row["x"] for row in rows_of(log)] == ["", "", "", "1.0", "1.0"]  # looked at after each step
    run(None, 1)
    assert [row["step"] for row in rows_of(log)] == ["1"]


def test_metrics_are_read_for_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    step, read, real = step_of(1), [], record.numbers_of
    monkeypatch.setattr(record, "numbers_of", lambda values, what: read.append(run.done) or real(values, what))
    run = quiet(step, step.init(PARAMS), batch, total=11, every=4)
    run_through(run)
    assert read == [1, 4, 8, 11]


def test_members_have_columns(tmp_path: Path) -> None:
    step = step_of(1)
    states = fz.stack([step.init(PARAMS), step.init(PARAMS)])
    run = quiet(
        torch.vmap(step), states, lambda n: [torch.stack([x, 2 * x]) for x in batch(n)], total=2, log=tmp_path / "l"
    )
    for _, metrics in run:
        assert [run.logged[f"loss.{i}"] for i in range(2)] == metrics["loss"].tolist()
    assert {"loss.0", "loss.1", "grad_norm.0", "grad_norm.1"} <= rows_of(tmp_path / "l")[0].keys()
    with pytest.raises(ValueError, match=r"evaluate gave \['loss'\], which are names"):
        run_through(quiet(step, step.init(PARAMS), batch, total=2, evaluate=lambda state: {"loss": 1.0}))


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    events: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    went = False
    for after, total in ((None, 4), (2, 6)):
        run = quiet(counted, 0, batch, after=after, total=total, tensorboard=tmp_path, every=1)
        for state, _ in run:
            if state == 4 and not went:
                run.done, run.state, went = 2, 2, True
    found = events.EventAccumulator(str(tmp_path))
    found.Reload()
    assert [event.step for event in found.Scalars("loss")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboard"), ("progress", "tqdm")])
def test_what_is_not_installed_is_asked_for(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [*sys.modules]:
        if module.startswith("torch.utils.tensorboard"):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)

    def rank_main(rank: int) -> None:
        step = step_of(2)
        options: Any = {"progress": False, name: str(tmp_path) if name == "tensorboard" else True}
        with pytest.raises(ImportError, match=f"pip install {package}"):
            next(fz.loop(step, step.init(PARAMS), lambda n: batch(n, rank), **options))

    run_ranks(rank_main, 2)
    if name == "progress":  # and where nobody asked for it, there is none
        assert len([*fz.loop(step_of(1), step_of(1).init(PARAMS), batch, total=2)]) == 2


def test_progress_shows_what_the_user_notes(capsys: pytest.CaptureFixture[str]) -> None:
    step = step_of(1)
    run = fz.loop(
        step, step.init(PARAMS), batch, total=3, progress="training", evaluate=lambda state: {"held out": 0.25}
    )
    for _ in run:
        run.note = f"note {run.done}"
    assert "training: 100%" in (said := capsys.readouterr().err) and "held out 0.25, note 3" in said


# ---- what is kept


def test_it_ends_where_nothing_gets_better_and_keeps_the_best(tmp_path: Path) -> None:
    values = [5.0, 4.0, math.nan, 3.0, 3.5, 3.0, 9.0, 1.0]
    step, best = step_of(1), fz.Checkpoints(tmp_path / "best", keep=1)
    kept = fz.Checkpoints(tmp_path / "kept")

    def run(after: Any, stop: int) -> fz.Loop[Any, Any]:
        state = step.init(PARAMS) if after is None else of_kept(kept, step)[0]
        run = quiet(
            step,
            state,
            batch,
            after=after,
            evaluate=lambda state: {"value": values[state.step // 2]},
            evaluate_every=2,
            patience=3,
            best=best,
            checkpoints=kept,
            stop=lambda: run.done >= stop,
        )
        return run_through(run)

    assert run(None, 9).ended == "asked"
    extra = of_kept(kept, step)[1]
    assert extra["loop"] == {"done": 9, "best": 3.0, "since": 1}
    own = run(extra, 99)
    assert (own.ended, own.done) == ("patience", 12)
    assert of_kept(best, step)[0].step == 6 and len(os.listdir(tmp_path / "best")) == 1


def test_states_are_saved_by_time_where_the_clock_of_one_rank_says_so(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        step, kept = step_of(2), fz.Checkpoints(tmp_path, keep=9)
        every = datetime.timedelta(days=1) if rank else datetime.timedelta(microseconds=1)
        run = quiet(step, step.init(PARAMS), lambda n: batch(n, rank), total=3, checkpoints=kept, save_every=every)
        run_through(run)

    run_ranks(rank_main, 2)
    assert sorted(name.split("-")[-1] for name in os.listdir(tmp_path)) == ["1", "2", "3"]


def test_a_donated_state_is_saved_as_it_was(tmp_path: Path) -> None:
    step, kept = step_of(1), fz.Checkpoints(tmp_path, keep=9)
    run_through(quiet(fz.donate(step), step.init(PARAMS), map(batch, range(4)), checkpoints=kept, save_every=1))
    assert sorted(path.name.split("-")[-1] for path in tmp_path.iterdir()) == ["1", "2", "3", "4"]
    for path in tmp_path.iterdir():
        state = fz.load(path, step)
        assert_trees_equal(fz.gather(state.params), fz.gather(by_hand(step, state.step, 0)[0].params))


# ---- steps of other kinds


def piped(groups: Any = None) -> tuple[Any, Any]:
    """A pipeline, and its state."""
    first = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]), fz.sgd(0.1))
    last = fz.train_step(lambda p, h, y: (h @ p["w"] - y).square().mean(), fz.sgd(0.1))
    pipe = fz.pipeline([first, last], fz.schedules.gpipe(2, 2), groups)
    return pipe, pipe.init([{"w": torch.eye(5, width, dtype=torch.float64)} for width in (5, 2)])


def even(number: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.cat([x, x + 1]) for x in batch(number))


def test_a_pipeline_a_component_elsewhere_and_a_plain_function() -> None:
    (pipe, state), losses = piped(), []
    for number in range(3):
        state, metrics = pipe(state, *even(number))
        losses.append(metrics["loss"].item())
    assert [m["loss"].item() for _, m in quiet(pipe, piped()[1], even, total=3)] == losses
    with fz.remote(lambda rank: (step_of(2), PARAMS), ranks=2, on="threads") as component:

        def update(state: Any, *inputs: torch.Tensor) -> Any:
            loss, pullback = component.vjp(state, *inputs)
            grads, _ = pullback(torch.ones_like(loss))
            state, metrics = component.update(state, grads)
            return state, {**metrics, "loss": loss}

        run = quiet(update, component.init(), even, total=2)
        for _, metrics in run:  # noqa: B007
            pass
        assert run.logged["loss"] == fz.fetch(metrics["loss"]).item()
    with pytest.raises(TypeError, match=r"got checkpoints=fz.Checkpoints\(...\) and state=PipelineState, expected"):
        fz.loop(pipe, state, even, checkpoints=fz.Checkpoints("nowhere"))


def at_places(rank: int, what: str) -> Any:
    pipe, state = piped([[0], [1]])

    def batches(number: int) -> Any:
        if (rank, number, what) == (1, 1, "batches"):
            raise OSError("no more disk")
        return even(number)

    given = [even(number) for number in range(3 - rank)] if what == "ends" else batches
    run = quiet(pipe, state, given, log="/proc/no/log.csv" if what == "log" else None)
    try:
        losses = [metrics["loss"].item() for _, metrics in run]
    except (OSError, RuntimeError) as error:
        return str(error)
    return run.ended, run.done, losses[-1] == run.logged["loss"]


@pytest.mark.parametrize(("what", "said"), [("ends", ""), ("batches", "no more disk"), ("log", "/proc/no")])
def test_places_of_a_pipeline_end_together(what: str, said: str) -> None:
    found = run_ranks(functools.partial(at_places, what=what), 2, backend="processes", timeout=60)
    assert found == [("batches", 2, True)] * 2 if what == "ends" else all(said in text for text in found), found


def test_a_generator_function_is_no_function_of_a_number() -> None:
    def batches(seed: int = 0) -> Iterator[int]:
        yield seed

    for made in (batches, functools.partial(batches, 3)):
        with pytest.raises(TypeError, match=r"got batches=.*generator function: call it, batches=name\(\)"):
            quiet(lambda state, x: (state, {}), 0, made)
    assert [state for state, _ in quiet(lambda state, x: (state + x, {}), 0, batches(3))] == [3]


def test_how_a_batch_is_passed() -> None:
    seen = []

    def step(state: int, *inputs: Any) -> tuple[int, dict[str, Any]]:
        seen.append(inputs)
        return state + 1, {}

    given = [(1, 2), [3, 4], {"a": 5}, 6, None, ()]
    assert [state for state, _ in quiet(step, 0, given)] == [1, 2, 3, 4, 5, 6]
    assert seen == [(1, 2), (3, 4), ({"a": 5},), (6,), (None,), ()]
    assert [*map(type, seen[0])] == [int, int]
