"""What fz.loop is given: refused by name at the call, and what a batch, a resumption and a step give is taken apart."""

from __future__ import annotations

import datetime
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch

from fzero.base.arguments import named, need_int, wrong
from fzero.checkpoint.checkpoints import Checkpoints
from fzero.loops.now_and_then import OWN
from fzero.state.sharded import check_buffers
from fzero.state.train_state import TrainState
from fzero.table.needs import is_component

S = TypeVar("S")
M = TypeVar("M")


def need_functions(**given: object) -> None:
    for name, fn in given.items():
        if name == "step" and (not callable(fn) or isinstance(fn, (type, torch.nn.Module))):
            raise wrong("loop", name, fn, "a function step(state, *inputs) -> (state, metrics)")
        if name != "step" and fn is not None and (not callable(fn) or is_component(fn)):
            raise wrong("loop", name, fn, "a function or None")


def pair(out: tuple[S, M]) -> tuple[S, M]:
    """The state and the metrics that a step gives."""
    if not isinstance(out, (tuple, list)) or len(out) != 2 or not isinstance(out[1], Mapping):
        got = " and ".join(map(named, out)) if isinstance(out, (tuple, list)) else named(out)
        raise TypeError(f"loop: step gave {got}, expected (state, metrics), a mapping of names to numbers.")
    return out[0], out[1]


def need_saves(state: object, checkpoints: object, best: object, every: object) -> None:
    for name, kept in (("checkpoints", checkpoints), ("best", best)):
        if kept is not None and not isinstance(kept, Checkpoints):
            raise wrong("loop", name, kept, "fz.Checkpoints(folder) or None")
        if kept is not None and not isinstance(state, TrainState):
            raise TypeError(
                f"loop: got {name}=fz.Checkpoints(...) and state={named(state)}, expected a state of one step. "
                "Save other states in the body of the loop, by fz.save or their own ways."
            )
        if kept is not None and isinstance(state, TrainState):
            try:
                check_buffers("", "params", state.params)
            except ValueError as error:
                raise ValueError(
                    f"loop: got {name}=fz.Checkpoints(...) and a state{error} Of an ensemble save the members in the "
                    "body of the loop, each for itself."
                ) from None
    folders = [os.path.realpath(kept.folder) for kept in (checkpoints, best) if isinstance(kept, Checkpoints)]
    if len(folders) > len({*folders}):
        raise ValueError(
            f"loop: got checkpoints= and best= in one folder, {folders[0]!r}, expected two: each would remove the "
            "other's checkpoints."
        )
    if isinstance(every, datetime.timedelta):
        if every <= datetime.timedelta(0):
            raise ValueError(f"loop: got save_every={every}, expected a time of more than 0.")
    elif every is not None:
        need_int(every, "loop", "save_every", "a number of steps, a datetime.timedelta or None", least=1)


def numbered(batches: object) -> Callable[[int], object]:
    """The batch behind so many others, as a function; of an iterable the next one."""
    expected = (
        "an iterable of batches that is no tuple, dict or str (which are one batch: a list [batch] has it), or a "
        "function of the number of steps that were taken before"
    )
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
    if inspect.isgeneratorfunction(batches):  # which gives a generator for each number, and no batch
        raise wrong("loop", "batches", batches, f"{expected}. It is a generator function: call it, batches=name()")
    return batches


def taken(after: object) -> tuple[int, float | None, int]:
    """What is known of a run: steps, the best number of an evaluation, evaluations since then."""
    if not isinstance(after, Mapping):
        expected = "the extra of a loop's checkpoint, a number of steps or None"
        return need_int(after, "loop", "after", expected, least=0), None, 0
    own = after.get(OWN)
    if not isinstance(own, Mapping) or not {"done", "best", "since"} <= own.keys():
        raise ValueError(
            f"loop: got after with the keys {sorted(map(str, after))}, expected the extra of a checkpoint that a loop "
            f"has saved, which has {OWN!r}; or a number of steps."
        )
    return own["done"], own["best"], own["since"]
