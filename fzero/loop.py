"""fz.loop: one step after the other, with what goes on around them: progress, logs, evaluation, checkpoints, an end."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, NoReturn, TypeVar

import torch

from fzero.base.arguments import named, need_int, need_path, wrong
from fzero.checkpoint.kept import Checkpoints
from fzero.loops.asked import Asked
from fzero.loops.evaluation import Evaluation
from fzero.loops.ranks import Ranks
from fzero.loops.record import Record
from fzero.loops.saves import OWN, Saves
from fzero.state.train_state import TrainState
from fzero.table.needs import is_component

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
    """Takes a step for each batch, and gives (state, metrics) after each: an iterator that may be left at any time.

    The first Ctrl-C or SIGTERM ends the loop after the step that is under way, with a checkpoint where there are any; a
    second one, a second later, does what it ever did (KeyboardInterrupt, the end of the process). All ranks of the
    state run the loop, and take the same number of steps: a signal that reaches one of them, batches that end on one,
    an error in them, end it on all. Rank 0 shows the progress and writes the logs. What one rank alone knows of an end
    goes into `stop`: all ranks leave the body of the `for` in the same round, or none.

    Args:
        step: any function `step(state, *inputs) -> (state, metrics)`: a step, a pipeline, a component on ranks of its
            own, or what is made of them. With `fz.donate` the state that was given before is dead after it.
        state: before the first step.
        batches: an iterable, or a function of the number of steps that were taken before. A batch that is a tuple or a
            list is the step's inputs, anything else its only input.
        total: steps after which it ends, those before a resumption included.
        after: what it goes on after: the `extra` of a checkpoint that a loop has saved, which the state is restored
            from, or a number of steps. An iterable of batches must begin there.
        progress: a bar of tqdm, or its label; None shows one where tqdm is installed.
        log: a CSV file of rows, one for each `every` steps. Rows of a run that is resumed stay up to where that begins.
        tensorboard: a folder for the same numbers.
        every: steps between two rows; metrics are read then, and nobody waits for the device in between.
        evaluate: `evaluate(state)`, the same numbers by name on all ranks, before the first step, after the last one
            and between.
        evaluate_every: steps between two evaluations.
        patience: evaluations in a row in which the first of these numbers is not lower than it ever was, after which
            the loop ends.
        best: keeps the states in which it is lowest: `fz.Checkpoints(folder, keep=1)`.
        checkpoints: keeps states, saved while training goes on, and the last one.
        save_every: steps between two of them, or a time (`datetime.timedelta`); by default the last one only.
        extra: gives what else their `extra` holds, the same on all ranks.
        stop: asked after each step whether to end, instead of signals.

    Raises:
        TypeError, ValueError: an argument of another kind; numbers that ranks have evaluated differently.
        ImportError: tqdm or tensorboard is asked for and not installed.
        Exception: what was raised on any rank in batches, in `stop`, in `extra` or in writing a log: on all of them,
            once the last state is saved.

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
    _need_functions(step=step, evaluate=evaluate, extra=extra, stop=stop)
    for name, given, least in (("total", total, 0), ("patience", patience, 1)):
        if given is not None:
            need_int(given, "loop", name, "a number or None", least=least)
    for name, given in (("every", every), ("evaluate_every", evaluate_every)):
        need_int(given, "loop", name, "a number of steps", least=1)
    _need_saves(state, checkpoints, best, save_every)
    if progress is not None and not isinstance(progress, (bool, str)):
        raise wrong("loop", "progress", progress, "True, False, None or a label")
    if evaluate is None and (patience is not None or best is not None):
        raise ValueError("loop: got patience or best, expected evaluate beside it: its first number says what is best.")
    if checkpoints is None and (save_every is not None or (extra is not None and best is None)):
        raise ValueError("loop: got save_every or extra, expected checkpoints=fz.Checkpoints(folder) beside it.")
    path = None if log is None else need_path(log, "loop", "log", "the path of a file")
    folder = None if tensorboard is None else need_path(tensorboard, "loop", "tensorboard")
    return Loop(
        step,
        state,
        _numbered(batches),
        after,
        total,
        Record(path, folder, progress, every),
        Evaluation(evaluate, evaluate_every, patience),
        Saves(checkpoints, save_every, best, extra),
        stop,
    )


class Loop(Generic[S, M]):
    """The steps of a run, made by `fz.loop`: an iterator of (state, metrics).

    It ends where nobody holds it any more, as at the end of a `for` that is left by break, return or an exception; one
    that has a name ends by `close()`.

    Attributes:
        state: the newest one, from which the next step begins; another one may be put there.
        done: how many steps were taken, those before a resumption included; may be set with the state.
        ended: why it has: "total", "batches" (there are no more), "patience", "asked" (a signal, or `stop`), "left",
            "failed"; "" before.
        logged: the numbers of the last row, by name: metrics, the seconds of a step, what was evaluated.
        note: a text that is shown behind the progress; may be set.
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
    ) -> None:
        self.state, self.done, self.ended, self.note = state, 0, "", ""
        self._step, self._batches, self._total, self._resumed = step, batches, total, after is not None
        self._record, self._evaluation, self._saves = record, evaluation, saves
        self._signals = Asked() if stop is None else None
        self._stop = stop or self._signals
        self._ranks: Ranks | None = None  # once it has begun
        self._error: Exception | None = None
        if after is not None:
            self.done, evaluation.best, evaluation.since = _taken(after)

    @property
    def logged(self) -> Mapping[str, float]:
        return self._record.logged

    def __iter__(self) -> Iterator[tuple[S, M]]:
        return self

    def __next__(self) -> tuple[S, M]:
        if self.ended:
            raise StopIteration
        try:
            if self._ranks is None:
                self._begin()
            self._between()
            inputs = self._inputs()
            self.state, metrics = self._step(self.state, *inputs)
            del inputs
            self.done += 1
            self._tell(metrics)
            return self.state, metrics
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leaves the loop: what it has begun to save is whole, files are closed, signals go where they went before."""
        self.ended, ranks, self._ranks = self.ended or "left", self._ranks, None
        if ranks is None:
            return
        try:
            self._record.show(self.done, self.note, self._evaluation.values)
            self._record.close()
            self._saves.wait()
        finally:
            if self._signals is not None:
                self._signals.end()

    def __del__(self) -> None:
        self.close()

    # ---- one after the other

    def _begin(self) -> None:
        self._ranks = ranks = Ranks(self.state)
        if self._signals is not None:
            self._signals.begin()
        self._tried(lambda: self._record.begin(self.done, self._total, self._resumed, ranks.leads), None)
        ranks.all_well(self._error)
        self._saves.begin(self.done)
        if not self._resumed and self._evaluation.due(self.done, True):
            values = self._look()
            self._tried(lambda: self._record.add({}, values), None)

    def _between(self) -> None:
        """What comes after the body of the `for`: here a loop ends, and states are saved."""
        assert self._ranks is not None
        self._record.show(self.done, self.note, self._evaluation.values)
        why, due = self._ranks.most(self._why(), self._saves.due(self.done))
        if why:
            self._end(why)
        if due or self._saves.better:
            self._record.pause(self._save(bool(due)))

    def _inputs(self) -> Sequence[object]:
        """Of the next step: all ranks have them, or none."""
        assert self._ranks is not None
        why, batch = 0, None
        try:
            batch = self._batches(self.done)
        except StopIteration:
            why = BATCHES
        except Exception as error:
            why, self._error = FAILED, error
        (why,) = self._ranks.most(why)
        if why:
            self._end(why)
        return batch if isinstance(batch, (tuple, list)) else (batch,)

    def _tell(self, metrics: Mapping[str, object]) -> None:
        """What is known after a step; where that fails on one rank, all hear of it before the next one."""
        last = self.done == self._total
        looks = self._evaluation.due(self.done, last)
        if looks or last or self._record.due(self.done):
            row = self._tried(lambda: self._record.read(self.done, metrics), {})
            values = self._look() if looks else {}
            self._tried(lambda: self._record.add(row, values), None)

    def _look(self) -> Mapping[str, float]:
        assert self._ranks is not None
        self._saves.better |= self._evaluation.look(self.state, self._ranks)
        return self._evaluation.values

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

    def _end(self, why: int) -> NoReturn:
        """Ends it on all ranks, which come here at once."""
        assert self._ranks is not None
        self.ended, error, self._error = WHY[why], self._error, None
        try:
            self._save(True)
        finally:
            try:
                if why == FAILED:
                    self._ranks.all_well(error)
            finally:
                del error  # which holds this frame
        if self._signals is not None:
            self._signals.heard = True
        self.close()
        raise StopIteration

    def _save(self, newest: bool) -> float:
        own = {"done": self.done, "best": self._evaluation.best, "since": self._evaluation.since}
        assert self._ranks is not None
        return self._saves.save(self.state, self.done, own, newest, self._ranks)


# ---- what it is given


def _need_functions(**given: object) -> None:
    for name, fn in given.items():
        if name == "step" and (not callable(fn) or isinstance(fn, (type, torch.nn.Module))):
            raise wrong("loop", name, fn, "a function step(state, *inputs) -> (state, metrics)")
        if name != "step" and fn is not None and (not callable(fn) or is_component(fn)):
            raise wrong("loop", name, fn, "a function or None")


def _need_saves(state: object, checkpoints: object, best: object, every: object) -> None:
    for name, kept in (("checkpoints", checkpoints), ("best", best)):
        if kept is not None and not isinstance(kept, Checkpoints):
            raise wrong("loop", name, kept, "fz.Checkpoints(folder) or None")
        if kept is not None and not isinstance(state, TrainState):
            raise TypeError(
                f"loop: got {name}=fz.Checkpoints(...) and state={named(state)}, expected the state of one step, which "
                "these keep. Save others in the body of the loop, by fz.save or their own ways."
            )
    if isinstance(every, datetime.timedelta):
        if every <= datetime.timedelta(0):
            raise ValueError(f"loop: got save_every={every}, expected a time of more than 0.")
    elif every is not None:
        need_int(every, "loop", "save_every", "a number of steps, a datetime.timedelta or None", least=1)


def _numbered(batches: object) -> Callable[[int], object]:
    """The batch behind so many others, as a function; of an iterable the next one."""
    expected = "an iterable of batches, or a function of the number of steps that were taken before"
    scalar = isinstance(batches, torch.Tensor) and not batches.ndim
    if isinstance(batches, Iterable) and not isinstance(batches, (str, Mapping, tuple)) and not scalar:
        begun: list[Iterator[object]] = []

        def taken(_: int) -> object:
            if not begun:
                begun.append(iter(batches))
            return next(begun[0])

        return taken
    if is_component(batches) or not callable(batches):
        raise wrong("loop", "batches", batches, expected)
    return batches


def _taken(after: object) -> tuple[int, float | None, int]:
    """The number of steps, the best number of an evaluation, and the number of evaluations since then."""
    if not isinstance(after, Mapping):
        return (
            need_int(after, "loop", "after", "the extra of a loop's checkpoint, a number of steps or None", 0),
            None,
            0,
        )
    own = after.get(OWN)
    if not isinstance(own, Mapping) or not {"done", "best", "since"} <= own.keys():
        raise ValueError(
            f"loop: got after with the keys {sorted(map(str, after))}, expected the extra of a checkpoint that a loop "
            f"has saved, which has {OWN!r}; or a number of steps."
        )
    return own["done"], own["best"], own["since"]
