"""fz.loop: one step after the other, with what goes on around them: progress, logs, evaluation, checkpoints, an end."""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from fzero.base.arguments import need_int, need_path, wrong
from fzero.checkpoint.checkpoints import Checkpoints
from fzero.loops.asked import Asked, warn_of
from fzero.loops.given import need_functions, need_saves, numbered, pair, taken
from fzero.loops.now_and_then import Evaluation, Saves
from fzero.loops.ranks import Ranks
from fzero.loops.record import Record

S = TypeVar("S")  # a state
T = TypeVar("T")
M = TypeVar("M", bound=Mapping[str, object])  # metrics

# why a loop ends; where ranks have several reasons, the last of these counts
WHY = ("", "asked", "patience", "batches", "total", "failed")
ASKED, PATIENCE, BATCHES, TOTAL, FAILED = range(1, len(WHY))


def loop(
    step: Callable[..., tuple[S, M]],
    state: S,
    batches: Callable[[int], object] | Iterable[object],
    *,
    total: int | None = None,
    after: int | Mapping[str, object] | None = None,
    progress: bool | str | None = None,
    log: str | os.PathLike[str] | None = None,
    tensorboard: str | os.PathLike[str] | None = None,
    every: int = 10,
    evaluate: Callable[[S], Mapping[str, object]] | None = None,
    evaluate_every: int = 100,
    patience: int | None = None,
    best: Checkpoints | None = None,
    checkpoints: Checkpoints | None = None,
    save_every: int | datetime.timedelta | None = None,
    extra: Callable[[], Mapping[str, object]] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Loop[S, M]:
    """Runs a training loop: an iterator of `(state, metrics)` after each step, with logs, evaluation and checkpoints.

    Leave it at any time, by break, return or an exception. The first Ctrl-C or SIGTERM ends it after the step under
    way, with a checkpoint if `checkpoints` is given. A second one, a second later, does what it always did.

    All ranks of the state run the loop, and take the same number of steps. A signal, the end of the batches or an error
    in them on one rank ends it on all. Rank 0 shows progress and writes logs.

    Args:
        step: any function `step(state, *inputs) -> (state, metrics)`: a step, a pipeline, a remote component, or yours.
        state: the state before the first step. With `fz.donate` it is dead afterwards.
        batches: a function of the number of steps taken before, or an iterable, but no tuple. A batch that is a tuple
            or a list is the step's inputs. Anything else is its only input.
        total: the number of steps after which the loop ends, with those before a resumption.
        after: to resume: the `extra` of a checkpoint that a loop saved, or a number of steps taken. An iterable of
            batches must begin there.
        progress: a bar of tqdm, or its label. None shows one if tqdm is installed.
        log: a CSV file, with a row for the first step of the run, each `every` steps and the last. A resumed run goes
            on in the file.
        tensorboard: a folder for the same numbers.
        every: steps between two rows. Metrics are read for rows only, so the device is not waited for in between.
        evaluate: `evaluate(state) -> {name: number}`, on all ranks: the mean over ranks is taken. It runs before the
            first step, every `evaluate_every` steps and after the last step, but not if a signal or `stop` ends the
            loop.
        evaluate_every: steps between two evaluations.
        patience: ends the loop after so many evaluations in a row in which the first number was not a new lowest.
        best: keeps the states in which that number is lowest: `fz.Checkpoints(folder, keep=1)`.
        checkpoints: keeps states, saved while training goes on, and the last one.
        save_every: steps or time (`datetime.timedelta`) between two saves. None saves the last state only.
        extra: `extra() -> dict` to save beside the states, the same on all ranks.
        stop: asked before each step whether to end, instead of on signals. True on one rank ends the loop on all.

    Returns:
        A `Loop`, to iterate over.

    Raises:
        TypeError, ValueError: an argument of another kind; numbers of `evaluate` that are none, that have other names
            on another rank, or that the log has no column for.
        ImportError: tqdm or tensorboard is asked for and not installed.
        RuntimeError: `step`, `evaluate`, `stop` or `extra` raised StopIteration.
        Exception: what batches, `evaluate`, `stop`, `extra` or a log raised on any rank: on all, once the last state is
            saved. What a step raises comes at once.

    Example:
        >>> import tempfile
        >>> step = fz.train_step(lambda p, x: ((p["w"] - x) ** 2).sum(), fz.sgd(0.5))
        >>> folder = tempfile.TemporaryDirectory()
        >>> def run(total):
        ...     kept = fz.Checkpoints(folder.name)
        ...     state, after = kept.restore(step) or (step.init({"w": torch.zeros(1)}), None)
        ...     batch = lambda number: torch.full((1,), float(number))
        ...     steps = fz.loop(step, state, batch, total=total, after=after, checkpoints=kept, progress=False)
        ...     return [metrics["loss"].item() for state, metrics in steps]
        >>> run(2), run(4)  # the second one goes on
        ([0.0, 1.0], [1.0, 1.0])
        >>> folder.cleanup()
    """
    need_functions(step=step, evaluate=evaluate, extra=extra, stop=stop)
    for name, given, least in (("total", total, 0), ("patience", patience, 1)):
        if given is not None:
            need_int(given, "loop", name, "a number or None", least=least)
    for name, given in (("every", every), ("evaluate_every", evaluate_every)):
        need_int(given, "loop", name, "a number of steps", least=1)
    need_saves(state, checkpoints, best, save_every)
    if progress is not None and not isinstance(progress, (bool, str)):
        raise wrong("loop", "progress", progress, "True, False, None or a label")
    if evaluate is None and (patience is not None or best is not None):
        raise ValueError("loop: got patience or best, expected evaluate beside it: its first number says what is best.")
    if checkpoints is None and (save_every is not None or (extra is not None and best is None)):
        raise ValueError("loop: got save_every or extra, expected checkpoints=fz.Checkpoints(folder) beside it.")
    path = None if log is None else os.path.abspath(need_path(log, "loop", "log", "the path of a file"))
    folder = None if tensorboard is None else os.path.abspath(need_path(tensorboard, "loop", "tensorboard"))
    kinds = {"evaluate": evaluate, "checkpoints": checkpoints, "best": best}
    said = [f"{name}={'None' if given is None else 'one'}" for name, given in kinds.items()]
    return Loop(
        step,
        state,
        numbered(batches),
        after,
        total,
        Record(path, folder, progress, every),
        Evaluation(evaluate, evaluate_every, patience, best is not None),
        Saves(checkpoints, save_every, best, extra),
        stop,
        f"total={total}, every={every}, evaluate_every={evaluate_every}, patience={patience}, {', '.join(said)}",
    )


class Loop(Generic[S, M]):
    """A running training loop, made by `fz.loop`: an iterator of `(state, metrics)`.

    It ends when nothing refers to it any more, as after a `for` that is left early. If it has a name, call `close()`,
    which also raises what went wrong with the last save.

    Attributes:
        state: the newest state. Set it, and the next step begins from there.
        done: the number of steps taken, with those before a resumption. You may set it with the state: the next rows
            take the place of those of later steps.
        ended: `"total"`, `"batches"` (there are no more), `"patience"`, `"asked"` (a signal, or `stop`), `"left"`,
            `"failed"`, or `""` while it runs.
        logged: the numbers of the last row, by name: metrics, seconds of a step, evaluations. Empty if all steps
            are done already.
        note: a text behind the progress bar. You may set it.
    """

    def __init__(
        self,
        step: Callable[..., tuple[S, M]],
        state: S,
        batches: Callable[[int], object],
        after: int | Mapping[str, object] | None,
        total: int | None,
        record: Record,
        evaluation: Evaluation,
        saves: Saves,
        stop: Callable[[], bool] | None,
        said: str,
    ) -> None:
        self.ended, self.state, self.done, self.note = "", state, 0, ""
        self._step, self._total, self._resumed = step, total, after is not None
        self._said = said  # what all ranks are given alike
        self._record, self._evaluation, self._saves = record, evaluation, saves
        self._signals: Asked | None = None  # once it has begun, where it is asked by them
        self._stop = stop
        self._batches = batches
        self._ranks: Ranks | None = None  # once it has begun
        self._process = 0  # that it has begun in
        self._unread: Mapping[str, object] | None = None  # metrics of the newest step, as long as no row has them
        self._error: Exception | None = None
        if after is not None:
            self.done, evaluation.best, evaluation.since = taken(after)
        self._own = self.state, self.done  # what nobody else has set

    @property
    def logged(self) -> Mapping[str, float]:
        return self._record.logged

    def __iter__(self) -> Iterator[tuple[S, M]]:
        """The loop without `close`: a generator that is freed in `yield from` would call it and lose its errors."""
        return map(Loop.__next__, itertools.repeat(self))

    def __next__(self) -> tuple[S, M]:
        if self.ended:
            raise StopIteration
        try:
            out = self._next()
        except BaseException as error:
            self.ended = "failed" if isinstance(error, Exception) else "left"
            self.close()
            if isinstance(error, StopIteration):  # which would end the `for` as if all was well
                raise RuntimeError("loop: step, evaluate, stop or extra raised StopIteration.") from error
            raise
        if out is None:
            self.close()
            raise StopIteration
        return out

    def close(self) -> None:
        """Ends the loop: finishes saves that have begun, closes files, and gives signals back."""
        self._close(later=False)

    def __del__(self) -> None:
        self._close(later=True)

    def _close(self, later: bool) -> None:
        self.ended, ranks, self._ranks = self.ended or "left", self._ranks, None
        self._unread, self._batches = None, None  # an iterator that nobody else has ends, and its workers
        if ranks is None or self._process != os.getpid():  # all of it is that process's
            return
        self._record.show(self.done, self.note, self._evaluation.values)
        try:
            try:
                self._record.close()
            finally:
                self._saves.wait()
        except Exception:
            self.ended = "failed"
            raise
        finally:
            if self._signals is not None:
                self._signals.end(later)

    # ---- one after the other

    def _begin(self) -> None:
        self._ranks, self._process = Ranks(self.state), os.getpid()
        if self._stop is None:
            self._stop = self._signals = Asked.begun()
        ranks = self._ranks
        self._tried(lambda: self._record.begin(self.done, self._total, self._resumed, ranks.leads), None)
        ranks.all_well(self._error)
        own = f"{self._said}, {self.done} steps before, best so far {self._evaluation.best}"
        if not ranks.alike(own):
            raise ValueError(
                f"loop: got {own} on this rank and others on another, expected the same on all. What one rank alone "
                "knows of an end goes into stop."
            )
        self._saves.begin(self._resumed)
        if not self._resumed and self._evaluation.due(self.done, True):
            self._tell(looks=True)

    def _next(self) -> tuple[S, M] | None:
        """What is given after one more step; None where the loop ends."""
        if self._ranks is None:
            self._begin()
        inputs = self._inputs() if self._goes_on() else None
        if inputs is None:
            return None
        self._unread = None
        self.state, metrics = pair(self._step(self.state, *inputs))
        del inputs
        self.done += 1
        self._own = self.state, self.done
        self._unread = {name: value for name, value in metrics.items() if name not in ("aux", "collected")}
        self._saves.saved = self._evaluation.fresh = False
        self._record.taken()
        last = self.done == self._total
        looks = self._evaluation.due(self.done, last)
        if looks or last or self._record.due(self.done):
            self._tell(looks)
        return self.state, metrics

    def _goes_on(self) -> bool:
        """What comes after the body of the `for`: here a loop ends, and states are saved."""
        assert self._ranks is not None
        if self.state is not self._own[0] or self.done != self._own[1]:  # it goes on from what the user has set
            need_int(self.done, "loop", "done", "a number of steps", least=0)
            self._own = self.state, self.done
            self._unread, self._saves.saved, self._evaluation.fresh = None, False, False
        self._record.show(self.done, self.note, self._evaluation.values)
        why, due = self._ranks.most(self._why(), self._saves.due(self.done))
        if why:
            self._end(why)
        elif due:
            self._record.pause(self._save())
        return not why

    def _inputs(self) -> Sequence[object] | None:
        """Of the next step: all ranks have them, or none."""
        assert self._ranks is not None and self._batches is not None
        why, batch = 0, None
        try:
            batch = self._batches(self.done)
        except StopIteration:
            why = BATCHES
        except Exception as error:
            why, self._error = FAILED, error
        (why,) = self._ranks.most(why)
        if not why:
            return batch if isinstance(batch, (tuple, list)) else (batch,)
        said = ""
        if why == FAILED and self._ranks.asked(self._stop):
            why, said, self._error = ASKED, repr(self._error) if self._error else "", None
        self._end(why)
        warn_of("batches", said)
        return None

    def _tell(self, looks: bool) -> None:
        """A row, with an evaluation or without; where that fails on one rank, the loop ends on all."""
        assert self._ranks is not None
        metrics, self._unread = self._unread, None
        row = {} if metrics is None else self._tried(lambda: self._record.read(metrics), {})
        if looks:
            self._tried(self._look, None)
        values = self._evaluation.values if looks and self._evaluation.fresh else {}
        if self._error is None:
            self._tried(lambda: self._record.add(self.done, row, values), None)
        (failed,) = self._ranks.most(self._error is not None)
        if failed:
            self._end(FAILED)

    def _look(self) -> None:
        """Evaluates, and begins to save a state that is the best so far; where that fails, all ranks raise."""
        assert self._ranks is not None
        if self._evaluation.look(self.state, self._ranks, self._stop):
            self._saves.save_best(self.state, self._known(), self._ranks)

    def _tried(self, job: Callable[[], T], otherwise: T) -> T:
        try:
            return job()
        except Exception as error:
            self._error = self._error or error
            return otherwise

    def _why(self) -> int:
        """Why this rank would end here; 0 where it would not."""
        assert self._stop is not None
        asked = self._tried(self._stop, False)
        if self._error is not None:
            return FAILED
        if self._total is not None and self.done >= self._total:
            return TOTAL
        return PATIENCE if self._evaluation.over else ASKED if asked else 0

    def _end(self, why: int) -> None:
        """Ends it on all ranks, which come here at once; where one has failed, all raise once the state is saved."""
        assert self._ranks is not None
        self.ended, error, self._error = WHY[why], self._error, None
        looks = why not in (ASKED, FAILED) and not self._evaluation.fresh and self._evaluation.due(self.done, True)
        if why == ASKED and self._signals is not None:
            self._signals.done()
        try:
            if why != FAILED and (looks or self._unread is not None):
                self._tell(looks)
            if why != FAILED or self.done:
                self._save()
        finally:
            if why == FAILED:
                self._ranks.all_well(error)

    def _known(self) -> dict[str, object]:
        return {"done": self.done, "best": self._evaluation.best, "since": self._evaluation.since}

    def _save(self) -> float:
        assert self._ranks is not None
        return self._saves.save(self.state, self._known(), self._ranks)
