"""fz.save and fz.save_async: a state is a value, so that a save needs no copy of it and no pause."""

from __future__ import annotations

import json
import os
import reprlib
import threading
import traceback
import uuid
from collections.abc import Callable

from fzero.base.arguments import wrong
from fzero.checkpoint import chunks
from fzero.checkpoint.files import Folder, path_of
from fzero.checkpoint.fill import Everyone, agreed
from fzero.checkpoint.manifest import TOGETHER
from fzero.checkpoint.remote import folder_at
from fzero.checkpoint.snapshot import Snapshot
from fzero.checkpoint.write import Board, write
from fzero.comm import backend
from fzero.state.beyond import Savable
from fzero.state.checks import constants
from fzero.state.train_state import TrainState


def save(path: str | os.PathLike[str], state: TrainState | Savable, extra: object = None) -> None:
    """Writes a checkpoint. When it returns, the checkpoint is whole and on the disk.

    All ranks of the state call it with the same path, in a folder that all of them reach. Each rank writes one
    safetensors file with its own slices. A checkpoint that was there before stays whole until the new one is whole.

    A state that is not sharded belongs to one rank, and only that rank calls it.

    Args:
        path: a folder, which is made if it is missing. Or a URL that fsspec knows, such as `s3://bucket/run`.
        state: of any step, wherever its buffers are; or of a pipeline, whose places all call this.
        extra: anything that JSON can say, such as a position in the data. The same on every rank.

    Raises:
        TypeError, ValueError: JSON cannot say `extra`; or the ranks differ in path, step or `extra`.
        ImportError: the URL needs a package that is not installed.
        OSError: the disk is full, the folder is not writable, another run saves there, or replicas of a value differ.
            It is raised on every rank.

    Example:
        >>> import tempfile
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.adamw(0.1))
        >>> state, _ = step(step.init({"w": torch.ones(3)}), torch.ones(3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fz.save(folder, state, extra={"seen": 3})
        ...     again = fz.load(folder, step)
        >>> again.step, torch.equal(again.params["w"], state.params["w"])
        (1, True)
    """
    if isinstance(state, Savable):
        return state.save_to(path_of(path, "save"), extra)
    begin("save", lambda: path_of(path, "save"), state, extra).wait()


def save_async(path: str | os.PathLike[str], state: TrainState, extra: object = None) -> Saving:
    """Begins a checkpoint and returns at once; training goes on while it is written.

    No copy is made: a state is a value, so it is its own snapshot. Its buffers live until they are written. A step with
    `fz.donate` leaves the buffers that are not yet written to the save. So memory grows by at most their bytes.

    Args:
        path: a folder, which is made if it is missing. Or a URL that fsspec knows, such as `s3://bucket/run`.
        state: of any step. All ranks of it call this.
        extra: anything that JSON can say, such as a position in the data. The same on every rank.

    Returns:
        A `fz.Saving`. Its `wait()` raises what went wrong; otherwise the next save raises it, on every rank.

    Raises:
        TypeError, ValueError: JSON cannot say `extra`; or the ranks differ in path, step or `extra`.
        OSError: the save before this one has failed, and nobody waited for it.

    Example:
        >>> import tempfile
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.adamw(0.1))
        >>> state = step.init({"w": torch.ones(3)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saving = fz.save_async(folder, state)
        ...     state, _ = step(state, torch.ones(3))  # the checkpoint is of the state before
        ...     saving.wait()
        ...     fz.load(folder, step).step
        0
    """
    return begin("save_async", lambda: path_of(path, "save_async"), state, extra, beside=True)


class Saving:
    """A save in the background; `fz.save_async` returns it.

    Attributes:
        path: of the checkpoint's folder.
    """

    def __init__(self, folder: Folder, snapshot: Snapshot, board: Board, then: Callable[[], None] | None) -> None:
        self.path = folder.path
        self._error: BaseException | None = None
        self._process = os.getpid()
        self._told, self._ended = False, threading.Event()
        # the interpreter waits for it, and nothing but it holds the state
        self._thread = threading.Thread(target=self._run, args=(folder, [snapshot], board, then), name="fzero-save")
        self._thread.start()

    def _run(
        self, folder: Folder, snapshot: list[Snapshot], board: Board, then: Callable[[], None] | None
    ) -> None:
        try:
            write(folder, snapshot.pop(), board, then)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # which hold the state, and errors that lead back to them
            error.__traceback__ = error.__cause__ = error.__context__ = None
            self._error = error
        finally:
            self._ended.set()

    @property
    def here(self) -> bool:
        """True in the process that began the save; False in one that was forked from it."""
        return os.getpid() == self._process

    @property
    def done(self) -> bool:
        """True when the save has ended, well or not."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Waits until the checkpoint is whole and on the disk.

        Raises:
            OSError: the save has failed, with the reason, on every rank.
        """
        self._join()
        if self._error is not None:
            raise self._error

    def _join(self) -> bool:
        """Waits for its end; whether somebody has done so before, and knows how it ended."""
        if not self._ended.is_set() and not self.here:
            raise RuntimeError(
                f"{self.path}: process {self._process} began this save, and this process was forked from it. Wait "
                "before the fork, or in that process."
            )
        self._ended.wait()  # an interrupted join would count as the thread's end (bpo-45274)
        self._thread.join()
        told, self._told = self._told, True
        self._forget()  # or it would hold the frames of whoever is told of its error
        return told

    def _forget(self) -> None:
        for rank in [rank for rank, own in list(_last.items()) if own is self]:
            _last.pop(rank, None)

    def untold(self) -> BaseException | None:
        """The error of a save that has ended, if nobody has seen it yet."""
        return None if self._join() else self._error

    def __repr__(self) -> str:
        return f"Saving({self.path!r}, {'ended' if self.done else 'under way'})"


_last: dict[int, Saving] = {}  # of each rank, until somebody has waited for it


def begin(
    who: str,
    folder_for: Callable[[], str],
    state: TrainState,
    extra: object,
    among: str | None = None,
    beside: bool = False,
    then: Callable[[], None] | None = None,
) -> Saving:
    """Begins a save, once the one before this has ended.

    Args:
        folder_for: gives the path; that of rank 0 counts.
        among: the folder that the ranks must agree on, where that is not the path itself.
        beside: whether training goes on meanwhile.
        then: what rank 0 does once the checkpoint is whole, where its folder is to be a new one.
    """
    if not isinstance(state, TrainState):
        raise wrong(f"fz.{who}", "state", state, "what step.init or a step returned")
    (state,) = constants(f"fz.{who}", state=state)
    axis, everyone = state.params.axis, Everyone(state.params.axis)
    own = backend.global_rank() if backend.initialized() else 0
    before = _last.get(own)

    def prepared() -> tuple[str, str, Snapshot]:
        if before is not None and before.here and (failed := before.untold()) is not None:
            raise OSError(
                f"fz.{who}: the save before this one has failed, and nobody waited for it: {before.path}: {failed}"
            ) from failed
        folder = folder_for()
        if TOGETHER in folder_at(folder).names():
            raise FileExistsError(
                f"{folder}: got a folder with a checkpoint of a pipeline. Save the state of one step into another "
                "folder."
            )
        text = as_json(extra, f"fz.{who}: extra")
        workers = 1 if beside else chunks.workers()  # a step beside it needs the other cores
        # a copy of what the caller may change while it is written
        return folder, text, Snapshot.of(state, json.loads(text), workers)

    folder, text, snapshot = agreed(axis, prepared, who)
    axis.check_same(
        f"component {axis.who}\npath {among or folder}\nupdate {state.step}\nseed {state.seed}\nextra {text}",
        f"fz.{who}: The saves",
        "Call it on every rank with the same path and extra. If a value differs by rank, give all ranks the list of "
        "values.",
    )
    token, folder = json.loads(everyone.exchange(json.dumps([uuid.uuid4().hex[:12], folder]), who)[0])
    board = Board(token, everyone.count, everyone.timeout, everyone.number)
    _last[own] = saving = Saving(folder_at(folder), snapshot, board, then)
    return saving


def as_json(value: object, place: str) -> str:
    """A value as JSON; refuses what JSON cannot say, or would give back as something else."""
    given, expected = reprlib.repr(value), (
        "expected what JSON can say: a dict with strings as keys, a list, a str, a number, True, False or None. Write "
        "x.tolist() for a tensor or an array, and list(x) for a tuple."
    )
    try:
        text = json.dumps(value)
        back = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{place}: got {given} ({error}), {expected}") from None
    if repr(back) != repr(value):
        raise TypeError(f"{place}: got {given}, which JSON gives back as {reprlib.repr(back)}, {expected}")
    return text
