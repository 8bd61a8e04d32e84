"""A new state from files: filled on every rank, or refused on every rank."""

from __future__ import annotations

import builtins
import functools
import json
from collections.abc import Callable
from typing import TypeVar, cast

import torch

from fzero.base import pytree
from fzero.checkpoint.choice import Choice, Wanted
from fzero.checkpoint.everyone import Everyone
from fzero.checkpoint.manifest import DamagedCheckpoint, NoCheckpoint
from fzero.comm.axis import Axis
from fzero.state.check_state import check_same_optimizer
from fzero.state.init import check_tables, init_state
from fzero.state.origin import Move, Origin
from fzero.state.sharded import Sharded
from fzero.state.train_state import TrainState
from fzero.table.spec import Spec

T = TypeVar("T")


def agreed(axis: Axis, job: Callable[[], T]) -> T:
    """What a job that communicates nothing gives; where it fails on one rank, every rank raises."""
    error, out = None, None
    try:
        out = job()
    except Exception as own:
        error = own
    if Everyone(axis).count > 1:
        said = json.dumps([type(error).__name__, str(error)] if error else [])
        for rank, text in enumerate(Everyone(axis).exchange(said, "load")):
            if error is None and (theirs := json.loads(text)):
                error = as_said(theirs[0], f"rank {rank}: {theirs[1]}")
    try:
        if error is not None:
            raise error
    finally:
        del error  # which holds this frame
    return cast(T, out)


def as_said(kind: str, text: str) -> Exception:
    """An error of another rank, of the same kind where a text makes one."""
    ours = {each.__name__: each for each in (DamagedCheckpoint, NoCheckpoint)}
    own = ours.get(kind) or getattr(builtins, kind, RuntimeError)
    try:
        error = own(text)
    except TypeError:  # UnicodeDecodeError and the like
        error = None
    return error if isinstance(error, Exception) else RuntimeError(text)


def filled(
    origin: Origin, choice: Choice, wanted: Wanted, step: Spec, axis: Axis, seed: int, count: int | None
) -> TrainState:
    """The state of a step with the values of an origin.

    Args:
        count: the number of updates so far; None where all but the params begins.
    """
    taken = sorted(choice.taken) if choice.partial else "all leaves"
    anew = "all but the params anew" if count is None else f"update {count}"
    check_tables(step, choice.layout, axis, f"seed {seed}, {anew}, lossy {wanted.lossy}, of {taken}")
    move = Move(origin, step, choice.device, wanted.lossy, count or 0, choice.taken)
    base = init_state(step, _base(wanted.like, choice), seed, sync=False).params if choice.partial else None
    params = agreed(axis, lambda: move.params(choice.layout, axis, choice.structure, base))
    params = move.held(params)
    check_same_optimizer("load", step.optimizer, params)
    moments, extra = move.begun(params, overwritten=count is not None and not choice.partial)
    grads = None
    if count is not None:

        def rest() -> tuple[object, dict[str, object], Sharded | None]:
            return move.moments(moments, choice.layout), move.extra(extra), move.grads(params)

        moments, extra, grads = agreed(axis, rest)
    return TrainState(params, grads, moments, extra, count or 0, seed, step.signature)


def _base(like: object, choice: Choice) -> object:
    """The params that leaves have which are not read; those that are need no values yet."""
    taken = [row.path in choice.taken for row in choice.layout.rows]
    makers = [
        functools.partial(torch.zeros, row.shape, dtype=row.dtype, device=choice.device) for row in choice.layout.rows
    ]
    leaves, spec = pytree.flatten(like)
    return pytree.unflatten(
        spec, [make if read else leaf for read, make, leaf in zip(taken, makers, leaves, strict=True)]
    )
