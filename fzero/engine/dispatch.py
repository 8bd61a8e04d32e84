"""A unit's call: as a node that gathers its handles, or as a plain call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fzero.base import private
from fzero.base.node import apply
from fzero.base.refusals import is_ours, noted
from fzero.capture.again import Again, Facts
from fzero.capture.surroundings import Surroundings
from fzero.capture.watch import elsewhere, refuse_leaks
from fzero.engine.call import Call
from fzero.engine.compiled import compiled
from fzero.engine.op import UnitOp
from fzero.engine.plain import CHECKPOINTED, plain_call
from fzero.engine.traversal import Traversal, current
from fzero.table.rows import Row


def call_unit(
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    seed: int | None = None,
    compilable: Callable[..., object] | None = None,
    surroundings: Surroundings | None = None,
    around: Callable[[Any], contextlib.AbstractContextManager[Any]] | None = None,
) -> Any:
    """Runs `fn(*args, **kwargs)` as one node, gathering the handles among its arguments.

    Args:
        seed: as in `plain_call`, where there are no handles.
        compilable: what runs in a compiled step in `fn`'s place; `fn` itself, compiled, by default.
        surroundings: what the function reads and writes beside its arguments; what it closes over by default.
        around: `around(args[0])` surrounds the pullback, which may run parts of the function again.
    """
    traversal, around_it = current.get(), surroundings or Surroundings(fn)
    plainly = functools.partial(
        plain_call,
        lambda: fn(*args, **kwargs),
        lambda seed: call_unit(fn, args, kwargs, seed, compilable, surroundings, around),
        (*args, *kwargs.values()),
        around_it,
    )
    if seed is None and (traversal is None or not traversal.acts):
        return plainly()
    if traversal is not None and traversal.acts and private.in_checkpoint():
        raise noted(TypeError(CHECKPOINTED))
    with elsewhere():
        call = Call(fn, args, kwargs, around_it, around)
        if call.reach.handles or seed is not None:
            try:
                return _call(call, traversal, seed, compilable)
            except Exception as error:
                if is_ours(error):
                    noted(error)
                raise
    return plainly()


def _call(call: Call, traversal: Traversal | None, seed: int | None, compilable: Callable[..., object] | None) -> Any:
    handles = call.reach.handles
    traversal = handles[0].owner if handles else traversal
    assert traversal is not None
    rows = [traversal.table.units[unit] for unit in dict.fromkeys(handle.unit for handle in handles)]
    if any(row.compile for row in rows):
        call.fn, call.compiles = compilable or compiled(call.fn), True
    remat = any(row.remat for row in rows)
    seed = traversal.next_seed() if seed is None else seed
    schedule = traversal.schedule
    number = schedule.called(tuple(dict.fromkeys(handle.key for handle in handles)))
    moving = call.moving
    call.knows(traversal, schedule.facts(number, moving))
    showed: Facts | None = None
    while True:
        if showed is not None:
            call.learn(showed)
        try:
            with _autocast(traversal, rows):
                result = _attempt(traversal, call, remat, seed, number)
            break
        except Again as again:
            showed = again.showed
    schedule.record.facts[number, moving] = call.known
    return result


def _autocast(traversal: Traversal, rows: Sequence[Row]) -> contextlib.AbstractContextManager[Any]:
    """What a unit runs under: as its caller does, but where its rows say something else."""
    wanted = {row.autocast for row in rows} or {traversal.table.outside}
    if len(wanted) > 1:
        raise noted(
            ValueError(
                f"A unit's call is given leaves of {', '.join(f'unit {row.unit!r}' for row in rows)}, which autocast "
                f"has in {' and '.join(map(str, wanted))}; expected one dtype. Let a pattern match all of them or none."
            )
        )
    (dtype,) = wanted
    if dtype == traversal.table.outside:
        return contextlib.nullcontext()
    return torch.autocast(traversal.device, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


def _attempt(traversal: Traversal, call: Call, remat: bool, seed: int, number: int) -> Any:
    refuse_leaks(call.reach.tensors)
    primals = {handle.key: handle.primal for handle in (*call.reach.handles, *call.more)}
    # a derivative of a derivative recomputes anyway: keep no graph for it
    recompute = remat or private.level() > 1
    op = UnitOp(traversal, list(primals), call, recompute, seed, number)
    call.unit, call.recomputes = op.unit, recompute
    operands, wanted = call.operands(list(primals.values()))
    return call.finish(apply(op, wanted, *operands))
