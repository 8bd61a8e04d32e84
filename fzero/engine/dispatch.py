"""A unit's call: as a node that gathers its handles; or, where nothing is gathered or recomputed, as a plain call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fzero.base import collecting, hooks, private, pytree, texts
from fzero.base.as_written import get_eval_frame_callback, need_eager
from fzero.base.carriers import changing, flatten, flatten_first
from fzero.base.collecting import open_here
from fzero.base.context import during, proves, within
from fzero.base.places import definition_of
from fzero.base.random import seeded
from fzero.base.refusals import is_ours, noted
from fzero.engine.called import need_made_again, need_read_again, need_same_arguments, put_together, taken_apart
from fzero.engine.compiled import compiled
from fzero.engine.op import Around, UnitOp
from fzero.engine.outlets import sharing
from fzero.engine.signature import KEPT, Signature, unit_of
from fzero.engine.straight import StraightOp
from fzero.engine.traversal import Traversal, current, here, inside, leaves_below
from fzero.purity import check
from fzero.purity.observer import Look, beside, looking
from fzero.purity.strict import is_strict
from fzero.purity.trial import Trial
from fzero.table.handle import Handle, HandleError, storage_of

CHECKPOINTED = (
    "A unit is called by torch.utils.checkpoint, which runs it again in the pullback, or by another thread: its params "
    "are not gathered for it there. Leave the checkpoint out, fz.remat(step) recomputes units; or call the checkpoint "
    "inside it; and call units on the thread that runs the step's function."
)


def call_unit(
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    seed: int | None = None,
    compilable: Callable[[], Callable[..., object]] | None = None,
    around: Around | None = None,
    prove: bool = True,
) -> Any:
    """Runs `fn(*args, **kwargs)` as one node, gathering the handles among its arguments.

    Args:
        seed: as in `plain_call`, where there are no handles.
        compilable: makes what runs in a compiled step in `fn`'s place; `fn` itself, compiled, by default.
        around: `around(args[0])` surrounds the pullback, which may run parts of the function again.
        prove: whether its first run proves that it is pure.
    """
    traversal = current.get()
    if traversal is not None and traversal.traced_unit is not None:
        return traversal.traced_unit(fn, args, kwargs, seed)
    owner: Traversal | None = None
    transformed, flat, spec = False, list[Any](), None
    if traversal is not None and (traversal.acts or seed is not None):
        transformed = private.transforms()
        if traversal.acts and transformed and traversal.depth() > 1:
            args, kwargs = leaves_below((args, dict(kwargs)))
        flat, spec = flatten((args, kwargs))
        for x in flat:
            if type(x) is Handle:
                owner = x.owner
                break
        else:
            owner = traversal if seed is not None else None
    if owner is None:
        node = functools.partial(call_unit, fn, args, kwargs, compilable=compilable, around=around, prove=prove)
        return plain_call(fn, lambda seed: node(seed=seed), fn, args, kwargs, prove=prove)
    assert spec is not None
    if get_eval_frame_callback():
        need_eager()
    traversal = owner
    schedule, look = traversal.schedule, looking.get()
    number, known = schedule.signatures()
    signature: Signature | None = None
    each: Any
    for each in known:
        if each.fits(traversal, fn, flat, spec, transformed):
            signature = each
            break
    first = signature is None or is_strict() or (private.dispatch_modes_on() and private.dispatch_modes("counts"))
    if signature is None or first:
        if hooks.in_checkpoint():
            raise noted(TypeError(CHECKPOINTED))
        flat, spec = flatten_first((args, kwargs))
        need_read_again(flat)
        before = signature
        signature = Signature(traversal, fn, flat, spec, transformed, bool(changing((args, kwargs))), prove)
        if before is not None and not is_strict():  # a mode is around it
            signature.plan, signature.repeated = before.plan, before.repeated
        need_made_again(signature.unit, fn, spec, flat)
    own_seed = traversal.next_seed() if seed is None else seed
    carriers = changing((args, kwargs)) if signature.carriers else ()
    if signature.straight and signature.proven and traversal.straight and not first:
        made = functools.partial(StraightOp, traversal, signature, fn, flat, spec, own_seed)
    else:
        run = (compilable() if compilable is not None else compiled(fn)) if signature.compiles else fn
        made = functools.partial(UnitOp, traversal, signature, run, fn, flat, spec, around, own_seed)
    around_it: list[contextlib.AbstractContextManager[object]] = [] if look is None else [beside()]
    if signature.casts != traversal.table.outside:
        around_it.append(autocast_to(traversal, signature.casts))
    try:
        result = within(around_it, lambda: made().applied(carriers)) if around_it else made().applied(carriers)
    except Exception as error:
        if is_ours(error):
            noted(error)
        raise
    if look is not None:
        _returned(look, signature.unit, flat, result, carriers)
        collecting.own(look.own)
    if first:
        schedule.note(number, signature, KEPT)
    return result


def autocast_to(traversal: Traversal, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    """A unit's call runs under its caller's autocast, but where its rows say another dtype."""
    if dtype == traversal.table.outside:
        return contextlib.nullcontext()
    return torch.autocast(traversal.device, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


def plain_call(
    fn: Callable[..., object],
    node: Callable[[int], object],
    of: object,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    leaves: Sequence[object] = (),
    undo: Callable[[], Callable[[], None]] | None = None,
    prove: bool = True,
) -> object:
    """A unit whose leaves are full tensors already is a plain call, which costs least.

    If its function does what functorch refuses (torch.utils.checkpoint, old-style Functions, requires_grad_), it runs
    as a node, as it does when it is sharded: `node(seed)`.

    Args:
        of: the unit's function, or its module.
        leaves: those of a module, which are in their places.
        undo: notes the module's buffers, and returns what puts them back.
        prove: as in `call_unit`.
    """
    traversal = current.get()
    if traversal is None:
        try:
            return fn(*args, **kwargs)
        except HandleError as error:
            if here.get() is not None:
                raise
            raise TypeError(CHECKPOINTED) from error
    seed, record = traversal.next_seed(), traversal.schedule.record
    code = id(of) if isinstance(of, torch.nn.Module) else getattr(of, "__code__", id(of))
    if code not in record.as_nodes:
        # of a module torch.utils.checkpoint runs parts again in the pullback, when its params are not there
        refusing = hooks.refused() if isinstance(of, torch.nn.Module) else contextlib.nullcontext()
        look = looking.get()
        try:
            with seeded(seed), inside(None), refusing:
                # within a checkpoint, which runs it again, the trial would count as a part of it
                if look is None or not proves.get() or hooks.in_checkpoint():
                    return fn(*args, **kwargs)
                if not prove:
                    return _unproven(look, traversal, fn, args, kwargs)
                return _proven(look, traversal, fn, args, kwargs, leaves, undo, seed)
        except (RuntimeError, KeyError) as error:
            if not texts.says(error, *texts.REFUSED):
                raise
            record.as_nodes.add(code)
    return node(seed)


def _unproven(
    look: Look, traversal: Traversal, fn: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> object:
    """What a unit returns that is called plainly in a first run, and that nobody looks at."""
    given = [x for x in flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    unit = unit_of(traversal, given)
    check.note(unit, None)
    with beside():
        result = fn(*args, **kwargs)
    _returned(look, unit, given, result)
    return result


def _proven(
    look: Look,
    traversal: Traversal,
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    leaves: Sequence[object],
    undo: Callable[[], Callable[[], None]] | None,
    seed: int,
) -> object:
    """What a unit returns that is called plainly in a first run: it is proven to be pure, as it would be as a node."""
    flat, spec = flatten_first((args, kwargs))
    need_read_again(flat)
    given, specs = [x for x in (*flat, *leaves) if isinstance(x, torch.Tensor)], list[pytree.Spec]()
    carriers, unit = changing((args, kwargs)), unit_of(traversal, given)
    need_made_again(unit, fn, spec, flat)
    rows, of = traversal.layout.rows, traversal.origins
    own_leaves = [(x, functools.partial(_leaf, rows[of[id(x)]].path)) for x in given if id(x) in of]

    def run() -> Sequence[object]:
        own, named = pytree.unflatten(spec, flat)
        inner = changing((own, named)) if carriers else []
        lists, others = collecting.OfUnit(), collecting.inside() if open_here() else contextlib.nullcontext()
        with during(collecting.current, lists), others:
            result = fn(*own, **named)
        if carriers:
            result = taken_apart(result, inner)
        else:
            need_same_arguments((own, named), flat, spec)
        out, own_spec = flatten_first(
            (result, collecting.taken_of(lists, others if isinstance(others, collecting.inside) else None))
        )
        specs[:] = [own_spec]
        need_made_again(unit, fn, own_spec, out)
        return out

    def tried(_: object) -> Sequence[object]:
        back = undo() if undo is not None else None
        out = run()  # what it has written before an error stays: the caller may catch that
        if back is not None:
            back()
        return out

    with beside():
        defined = definition_of(fn)
        trial = Trial(f"Unit {unit!r}", tried, given, own_leaves, seed, defined=defined)
        out = trial.compared(run)
    check.note(unit, len(trial.look.captured))
    result, taken = pytree.unflatten(specs[0], out)
    if taken is not None:
        collecting.put(taken)
    result = put_together(result, carriers) if carriers else result
    _returned(look, unit, given, result, taken, carriers)
    return result


def _returned(look: Look, unit: str, given: Sequence[object], result: object, *more: object) -> None:
    """What a unit returns is the function's own, which writes to none of it that is no memory of its own."""
    what = f"an output of unit {unit!r} that shares memory with its other outputs or its inputs"
    shared = {storage_of(x): private.unwrapped(x).untyped_storage() for x in sharing(flatten(result)[0], given)}
    look.give(dict.fromkeys(shared, lambda _: what))
    look.held += shared.values()
    look.own((result, *more))


def _leaf(path: str, _: torch.Tensor) -> str:
    return f"leaf {path!r}"
