"""A unit's call: as a node that gathers its handles; or, where nothing is gathered or recomputed, as a plain call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fzero.base import hooks, private, texts
from fzero.base.patterns import ROOT
from fzero.base.random import seeded
from fzero.base.refusals import first_words, is_ours, noted, place_of
from fzero.capture.again import Again, Facts
from fzero.capture.handle import HandleError
from fzero.capture.second_run import SecondRun
from fzero.capture.surroundings import Reach, Surroundings
from fzero.capture.watch import elsewhere, refuse_leaks
from fzero.comm.divergence import happened
from fzero.engine.call import Call
from fzero.engine.compiled import compiled
from fzero.engine.op import UnitOp
from fzero.engine.route import note_route
from fzero.engine.straight import autocast_to, call_straight
from fzero.engine.traversal import Traversal, current, here, inside, leaves_below
from fzero.stores.put import DEVICE
from fzero.table.names import NO_NAMES
from fzero.table.rows import Row

CHECKPOINTED = (
    "A unit is called by torch.utils.checkpoint, which runs it again in the pullback, or by another thread: its params "
    "are not gathered for it there. Leave the checkpoint out, fz.remat(step) recomputes units; or call the checkpoint "
    "inside it; and call units on the thread that runs the step's function."
)

# what functorch refuses, and what runs in a node
_NAMES = frozenset(
    "checkpoint checkpoint_sequential apply requires_grad_ backward deepcopy data saved_tensors_hooks save_on_cpu "
    "ctc_loss to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc sparse_csr_tensor sparse_csc_tensor "
    "sparse_bsr_tensor sparse_bsc_tensor sparse_compressed_tensor cond while_loop scan associative_scan "
    "flex_attention".split()
)


def call_unit(
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    seed: int | None = None,
    compilable: Callable[..., object] | None = None,
    surroundings: Surroundings | None = None,
    around: Callable[[Any], contextlib.AbstractContextManager[object]] | None = None,
) -> Any:
    """Runs `fn(*args, **kwargs)` as one node, gathering the handles among its arguments.

    Args:
        seed: as in `plain_call`, where there are no handles.
        compilable: what runs in a compiled step in `fn`'s place; `fn` itself, compiled, by default.
        surroundings: what the function reads and writes beside its arguments; what it closes over by default.
        around: `around(args[0])` surrounds the pullback, which may run parts of the function again.
    """
    traversal = current.get()
    if seed is None and traversal is not None and traversal.acts:
        done = call_straight(traversal, fn, args, kwargs, around)
        if done is not None:
            return done[0]
    around_it = surroundings or Surroundings(fn)
    if private.level() > 1 and traversal is not None and traversal.acts:
        args, kwargs = leaves_below((args, dict(kwargs)))
    plainly = functools.partial(
        plain_call,
        lambda: fn(*args, **kwargs),
        lambda seed: call_unit(fn, args, kwargs, seed, compilable, surroundings, around),
        (*args, *kwargs.values()),
        around_it,
    )
    if seed is None and (traversal is None or not traversal.acts):
        return plainly()
    if traversal is not None and traversal.acts and hooks.in_checkpoint():
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


def _call(
    call: Call, traversal: Traversal | None, seed: int | None, compilable: Callable[..., object] | None
) -> object:
    traversal = call.owner or traversal
    assert traversal is not None
    rows = [traversal.table.units[unit] for unit in dict.fromkeys(key.unit for key in call.primals)]
    if any(row.compile for row in rows):
        call.fn, call.compiles = compilable or compiled(call.fn), True
    remat = any(row.remat for row in rows)
    memory = next((row.activations for row in rows if row.activations != DEVICE), DEVICE)
    names = next((row.names for row in rows if row.names != NO_NAMES), NO_NAMES)
    seed = traversal.next_seed() if seed is None else seed
    schedule = traversal.schedule
    number, moving = schedule.called(tuple(call.primals)), call.moving
    # of another function, or one that is recomputed otherwise, other things were looked at
    place = number, moving, remat, names, _code_of(call.fn)
    call.knows(traversal, schedule.facts(place))
    showed: Facts | None = None
    casts = _compute_dtype([*rows, *_full_rows(traversal, call)], traversal.table.outside)
    while True:
        if showed is not None:
            call.learn(showed)
        try:
            with autocast_to(traversal, casts):
                refuse_leaks(call.reach.tensors)
                result = UnitOp(traversal, call, remat, seed, number, memory, names).applied()
            break
        except Again as again:
            showed = again.showed
            units = " and ".join(dict.fromkeys(repr(key.unit) for key in call.primals)) or "of full params"
            happened(f"unit {units} began again, as {showed}")
    schedule.record.facts[place] = call.known
    if names == NO_NAMES:
        note_route(call, traversal, number, remat, memory, result, casts)
    return result


def _code_of(fn: Callable[..., object]) -> object:
    """What functions have in common that are made anew in each run."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(getattr(fn, "__func__", fn), "__code__", type(fn))


def _full_rows(traversal: Traversal, call: Call) -> list[Row]:
    """The rows of units whose leaves a call is given in full, as nothing else is done with those."""
    indices = [i for x in call.reach.tensors if (i := traversal.origins.get(id(x))) is not None]
    units = dict.fromkeys(traversal.layout.rows[i].unit for i in indices)
    return [traversal.table.units[unit] for unit in units if unit != ROOT]


def _compute_dtype(rows: Sequence[Row], outside: torch.dtype | None) -> torch.dtype | None:
    """The dtype of a call's autocast, which its rows say: `outside`, that of its caller, if there are none."""
    wanted = {row.autocast for row in rows} or {outside}
    if len(wanted) > 1:
        raise noted(
            ValueError(
                f"A unit's call is given leaves of {', '.join(f'unit {row.unit!r}' for row in rows)}, which autocast "
                f"has in {' and '.join(map(str, wanted))}; expected one dtype. Let a pattern match all of them or none."
            )
        )
    (dtype,) = wanted
    return dtype


class _Undo:
    """Undoes a plain call in which functorch refuses something, so that it can be run as a node."""

    def __init__(self, arguments: Sequence[object], surroundings: Surroundings) -> None:
        self._refusal: TypeError | None = None
        try:
            self.reach = Reach(arguments, surroundings)
        except TypeError as error:  # of what another run could not do, should there be one
            self._refusal = error
            return
        self._second, self._versions = SecondRun(self.reach), [*map(private.version, self.reach.tensors)]
        self._second.begin(True, False)

    @property
    def may_be(self) -> bool:
        """Tells whether the unit's code names something that functorch refuses, or the unit reaches such a tensor."""
        if self._refusal is not None or self.reach.names(_NAMES):
            return True
        return any(x.layout in texts.COMPRESSED for x in (*self.reach.tensors, *self.reach.constants))

    def __call__(self, error: BaseException) -> None:
        if self._refusal is not None:
            raise self._refusal
        what = f"A unit{place_of(error)}"
        for x, version in zip(self.reach.tensors, self._versions, strict=True):
            if private.version(x) != version:
                raise ValueError(
                    f"{what} changes one of its inputs in place, of shape {tuple(x.shape)}, and does then what "
                    f"torch.func refuses ({first_words(error)}), so that it runs again. Change a copy: x = x.clone()."
                ) from error
        self.reach.restore()
        self._second.look()
        self._second.refuse(place_of(error).strip(" ()"))
        self._second.rewind()


def _as_in_torch_func(surroundings: Surroundings) -> contextlib.AbstractContextManager[object]:
    """Of a module torch.utils.checkpoint runs parts again in the pullback, when its params are not there."""
    return hooks.refused() if isinstance(surroundings.of, torch.nn.Module) else contextlib.nullcontext()


def plain_call(
    fn: Callable[[], object], node: Callable[[int], object], arguments: Sequence[object], surroundings: Surroundings
) -> object:
    """A unit whose leaves are full tensors already is a plain call, which costs least.

    Where its function does what functorch refuses (torch.utils.checkpoint, old-style Functions, requires_grad_), it
    runs as a node, as it does when it is sharded: `node(seed)`.

    Args:
        arguments: and what it reaches besides: what it has changed there until it is refused is put back.
    """
    traversal = current.get()
    if traversal is None:
        try:
            return fn()
        except HandleError as error:
            if here.get() is not None:
                raise
            raise TypeError(CHECKPOINTED) from error
    seed, record = traversal.next_seed(), traversal.schedule.record
    code = getattr(surroundings.of, "__code__", id(surroundings.of))
    if code not in record.as_nodes:
        undo = None
        if record.may_be.get(code, True):
            with elsewhere():
                undo = _Undo(arguments, surroundings)
            record.may_be[code] = undo.may_be
        try:
            with seeded(seed), inside(None), _as_in_torch_func(surroundings):
                return fn()
        except (RuntimeError, KeyError) as error:
            if not texts.says(error, *texts.REFUSED):
                raise
            record.as_nodes.add(code)
            if undo is None:
                raise TypeError(
                    f"A unit{place_of(error)} does what torch.func refuses ({first_words(error)}), which no call "
                    "of its code did before and its names do not show: what it had done until then was not noted. Call "
                    "the step again with the same state: it is dealt with from now on."
                ) from error
            undo(error)
    return node(seed)
