"""One run of the user's function: on what, and what is looked at around it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fzero.base import collecting, private, pytree
from fzero.base.context import during, jitting, proves
from fzero.base.follow import is_transformed
from fzero.base.node import active
from fzero.base.patterns import ROOT
from fzero.base.rebound import rebound, tensors_held, tensors_reached
from fzero.base.refusals import heard, place_of, refuse_outside
from fzero.comm.axis import Axis
from fzero.comm.linear import on_data
from fzero.engine.hidden import Hidden, looking, on_ranks
from fzero.engine.masking import masked_call, noting
from fzero.engine.schedule import first_runs
from fzero.engine.traversal import Traversal, autocast, read
from fzero.engine.use import Use
from fzero.engine.written import LeafOf, leaf_of, named, stored, unwritten
from fzero.formats.formats import Plain
from fzero.purity.observer import looking_at
from fzero.purity.strict import is_strict
from fzero.purity.trial import names_of
from fzero.state.checks import check_values, transform_of
from fzero.state.sharded import Sharded
from fzero.state.train_state import TrainState
from fzero.stores.away import Away, Placed
from fzero.table.counting import Mask
from fzero.table.handle import Handle, StandIn, protecting, storage_of
from fzero.table.layout import Key
from fzero.table.names import need_given
from fzero.table.placements import has_run, noted, notes
from fzero.table.spec import Spec


def traversal_of(
    step: Spec,
    state: TrainState,
    seed: tuple[int, ...],
    unreduced: bool = False,
    fused: bool = False,
    derived: bool = True,
    mask: Mask | None = None,
    runs: bool = True,
) -> tuple[Traversal, dict[Key, torch.Tensor], dict[Key, torch.Tensor]]:
    """Makes what one run needs: the traversal, the tensors to differentiate, and the fixed (frozen) ones.

    Args:
        unreduced: leave cotangents full and unreduced where no rank keeps a slice of them, as microbatches are summed.
        fused: params may be overwritten once their cotangents are there.
        derived: whether it will be pulled back.
        mask: whether it then adds anything to gradients.
        runs: False where it is traced only: other ranks may not trace, so this is none of the numbered runs.
    """
    params, table = state.params, step.table(state.layout)
    uses, primals, fixed = {}, {}, {}
    # in ZeRO-1 and 2 one rank alone may run forward
    numbered = runs and jitting.get() is None and (derived or table.gathers or bool(params.stale))
    axis = params.axis.of_next_run(state.step) if numbered and params.axis.ranks > 1 else params.axis
    entries, at_hand, device, followed = params.entries, params.held_entries, params.device, is_transformed()
    for key in params.groups:
        row = params.layout.groups[key].row
        policy = row.policy
        assert policy.param and policy.compute and policy.reduce and policy.grad
        if followed and params.follows(key):
            primal, uses[key] = _followed(params, key, axis)
            (fixed if row.frozen else primals)[key] = primal
            continue
        later = unreduced and sums_whole(params, key)
        held = at_hand.get(key) if key not in params.stale else None
        shard = params.placed(key) if key in entries else _stand_in(params, key)
        rounded = not row.frozen and (later or policy.reduce != policy.param)
        placeholder = fused or not shard.format.plain or shard.away or rounded
        primal, whole = shard.parts[0], None
        if isinstance(held, Away):
            whole, held = Placed(Plain(policy.compute), (held,)), None
        if placeholder or not isinstance(primal, torch.Tensor):
            # cotangents take the primal's dtype and shape: a placeholder without memory takes the stored one's place
            numel = params.layout.groups[key].numel if later else shard.numel()
            primal = torch.zeros((), dtype=policy.reduce, device=device).expand(numel)
        (fixed if row.frozen else primals)[key] = primal
        uses[key] = Use(
            tag=key,
            axis=Axis() if later else axis if row.cuts else axis.uncut,
            shard=whole or shard,
            device=device,
            compute=policy.compute,
            reduce=policy.reduce,
            grad=policy.grad,
            wire=policy.wire,
            placeholder=placeholder,
            gather8=policy.gather is not None,
            held=held,
            whole=whole is not None,
            mapped=row.reads_files and row.remat and not row.names.all,
        )
    state.params  # noqa: B018 - or an update that it was donated to meanwhile saw nobody who holds its buffers
    traversal = Traversal(params.layout, table, uses, seed, device.type, params.axis)
    traversal.run = axis.run
    traversal.means = step.microbatches.means, derived and step.microbatches.weights is None
    if mask is not None:
        traversal.mask = mask
        for use in uses.values() if mask.partial else ():
            use.mask = mask
    if followed and params.axis.ranks > 1:
        traversal.fn = _alike(step.fn, params.axis)
    return traversal, primals, fixed


def _followed(params: Sharded, key: Key, axis: Axis) -> tuple[torch.Tensor, Use]:
    """This rank's slice of a group that a transform goes on through, and its use, of which nothing is at hand."""
    row = params.layout.groups[key].row
    policy, value = row.policy, params.local(key)
    assert policy.compute and policy.reduce and policy.grad
    primal = value if row.frozen else value.to(policy.reduce)  # the dtype that its cotangents are summed in
    plain = primal if private.is_mapped(primal) else private.unwrapped(primal)
    use = Use(
        tag=key,
        axis=axis if row.cuts else axis.uncut,
        shard=Placed(Plain(primal.dtype), (plain,)),
        device=params.device,
        compute=policy.compute,
        reduce=policy.reduce,
        grad=policy.grad,
        wire=policy.wire,
        followed=True,
    )
    return primal, use


def sums_whole(params: Sharded, key: Key) -> bool:
    """Tells whether a group's gradients are summed over microbatches unreduced, as no rank keeps a slice.

    Nor gathers one: a full buffer that is stale is made of the slices in each run, over the ranks that reduce.
    """
    grads = params.layout.groups[key].row.grads
    return grads is not None and not grads.cuts and params.axis.ranks > 1 and key not in params.stale


def _stand_in(params: Sharded, key: Key) -> Placed:
    """For a shard that lies in the full buffer at hand: nobody reads it, and it must not count as a holder of that."""
    full, numel = params.held_entries[key], params.layout.shard_numel(key)
    form = params.format(key)
    return Placed(form, (torch.zeros((), dtype=full.dtype, device=full.device).expand(numel),))


def _alike(fn: Callable[..., object], axis: Axis) -> Callable[..., object]:
    """The function, in which what it closes over and a transform goes on through has the derivatives of the mean.

    All ranks must have it alike: what is each rank's own is an input.
    """
    captured = {id(x): x for x in tensors_held(fn) if transform_of(x) is not None}
    if not captured:
        return fn
    check_values(
        axis,
        captured.values(),
        "What fn closes over and torch.func goes on through",
        "Give each rank's own as an input of the step, behind the state.",
    )
    return rebound(fn, lambda x: on_data(axis, x) if id(x) in captured else x)


def _hidden(
    traversal: Traversal, primals: Mapping[Key, torch.Tensor], inputs: Sequence[object], fn: Callable[..., object]
) -> contextlib.AbstractContextManager[object]:
    """Refuses what a transform goes on through and the function comes to unseen: on ranks, or where one looks."""
    refusal = looking.get()
    if traversal.fn is None and refusal is None:
        return contextlib.nullcontext()
    # another run is given the tensors of inputs, and not those that objects among them hold
    seen = refusal is not None
    given = pytree.Split(tuple(inputs), pytree.is_tensor).leaves[0] if seen else tensors_reached(list(inputs))
    known = [*primals.values(), *given, *tensors_held(fn)]
    return Hidden(known, refusal or on_ranks, mapped=refusal is not None)


def _need_names(traversal: Traversal) -> None:
    """Refuses names that no unit has given, where some were to be kept."""
    told = [each for each in traversal.named if each is not None]
    given = {name for each in told for name in each}
    lost = sorted(traversal.table.names - given)
    if lost and all(row.unit == ROOT for row in traversal.table.rows if row.names.all):
        raise ValueError(
            f"remat: got the name {lost[0]!r} to keep, and its leaves lie in no unit, which could be recomputed; "
            "expected leaves of units, in a list ('blocks.0.w'), or named by train_step(units=...)."
        )
    if told and len(told) == len(traversal.named):
        need_given(traversal.table.names, given, " that is recomputed")


def given_out(x: object) -> object:
    """A leaf of what a step's function returns, as it leaves it."""
    return read(x) if isinstance(x, Handle) else x.outside() if isinstance(x, StandIn) else x


def _copied(x: object) -> object:
    return x.clone() if isinstance(x, torch.Tensor) else x


@contextlib.contextmanager
def _looking(given: Mapping[int, LeafOf]) -> Iterator[None]:
    """Around the first run of a function."""
    with looking_at("step: the function", given) as look:

        def protect(copy: torch.Tensor, path: str) -> None:
            look.give({storage_of(copy): lambda _: f"leaf {path!r}"})
            look.held.append(private.unwrapped(copy).untyped_storage())  # or the function's own may come to lie there

        with during(protecting, protect):
            yield


def call_function(
    step: Spec, state: TrainState, traversal: Traversal, primals: Mapping[Key, torch.Tensor], inputs: Sequence[object]
) -> Any:
    """The user's function on the tree of full tensors and handles."""
    tensors = [*primals.values(), *[x for x in pytree.flatten(tuple(inputs))[0] if isinstance(x, torch.Tensor)]]
    # of a state that was converted other groups are called, and other leaves are differentiated
    form = (private.level(), torch.is_grad_enabled(), tuple(active(tensors)), hash(state.layout))
    # what a trace calls says nothing of runs, and other ranks may not trace
    records, traced = state.params.axis.records, jitting.get() is not None
    traversal.schedule.expect({} if traced else records, step.fn, form)
    storages = {storage_of(buffer) for _, buffer in stored(state.params)}
    first = not traversal.schedule.ran_before or is_strict()
    leaves, layout = traversal.leaves(primals), traversal.layout
    # the leaves of a group share their memory, and the count of writes to it
    full = [(leaves[g.slots[0].leaf], g) for g in layout.groups.values() if g.unit not in traversal.table.acting]
    entered = private.versions([leaf for leaf, _ in full])

    look: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    collectives: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if first and not traversal.table.compiled and proves.get():
        own = inputs[1:] if step.carries else inputs  # it may write to its copy of what is carried
        tensors = [x for x in pytree.flatten(own)[0] if isinstance(x, torch.Tensor) and not isinstance(x, StandIn)]
        memories = [(leaf, leaf_of(group)) for leaf, group in full]
        look = _looking(names_of(tensors, memories) | named(state.params))
        collectives = traversal.collectives("step: the function")
    tree = pytree.unflatten(state.params.structure, leaves)
    over = traversal.tensor
    given = inputs, traversal.table.sequence
    before = {} if is_strict() else traversal.schedule.record.first_runs
    before = dict(first_runs(records, step.fn, form[1], given)) if traced and over is not None else before
    moves = lambda xs: any(map(private.is_differentiated, xs))
    derived = over is not None and (moves((*tensors, *leaves)) or moves(tensors_held(step.fn)))
    checked = (step, state.params, inputs) if derived and not traced else None
    known = noted(over, before, given, checked)
    with (
        unwritten(state, "The step's function"),
        autocast(traversal.device, traversal.table.outside),
        traversal.running(),
        traversal.schedule.forward(),
        look,
        collectives,
    ):
        try:
            fn = traversal.fn or step.fn
            if step.carries:  # which it may write to
                inputs = (pytree.map_leaves(_copied, inputs[0]), *inputs[1:])
            with (
                heard(),
                during(notes, known),
                _hidden(traversal, primals, inputs, fn),
                during(collecting.current, traversal.collected),
            ):
                out = masked_call(traversal.mask, fn, tree, inputs) if traversal.guards else fn(tree, *inputs)
        except (RuntimeError, KeyError, TypeError) as error:
            refuse_outside(error)
            _add_hint(error, state.params, inputs)
            raise
        except StopIteration as error:  # which would end an iterator around the call as if all was well
            raise RuntimeError(f"step: the function raised StopIteration{place_of(error)}.") from error
        out = pytree.map_leaves(given_out, out)
        out = noting(traversal.mask, out) if traversal.guards else out
        if not traversal.schedule.ran_before:
            _need_names(traversal)
        has_run(known, before, given)
    for (_, group), version, now in zip(full, entered, private.versions([leaf for leaf, _ in full]), strict=True):
        if now != version:
            raise ValueError(
                f"step: the function writes to leaf {' or '.join(repr(slot.path) for slot in group.slots)} in place, "
                "outside of units (as nn.Embedding(max_norm=...) does). Params change in step.update only: compute "
                "with a copy (w = w.clone()), or use operations that are not in place."
            )

    # what is the state's own memory is copied, as the caller may write to what is given out
    def apart(x: Any) -> Any:
        return x.clone() if isinstance(x, torch.Tensor) and storage_of(x) in storages else x

    for found in traversal.collected.values():
        found[:] = map(apart, found)
    return pytree.map_leaves(apart, out)


_DTYPES = re.compile(r"dtype|scalar type|data type|type .*should be the same", re.IGNORECASE)
_HALF = (torch.bfloat16, torch.float16)


def _add_hint(error: Exception, params: Sharded, inputs: Sequence[object]) -> None:
    """Says what to write, on an error of torch's, if an input is a numpy array or of another device or dtype."""
    if isinstance(error, KeyError):  # whose text is a key
        return
    names, leaves, _ = pytree.named_leaves(tuple(inputs))
    arrays = [name for name, x in zip(names, leaves, strict=True) if isinstance(x, np.ndarray)]
    text = str(error)
    if arrays and "ndarray" in text:
        error.add_note(f"Input {arrays[0]} is a numpy array, and params are tensors. Pass torch.as_tensor(x).")
        return
    here = params.device
    computed = [group.row.policy.compute for group in params.layout.groups.values()]
    for name, x in zip(names, leaves, strict=True):
        if not isinstance(x, torch.Tensor):
            continue
        if x.device != here and "device" in text:
            error.add_note(f"Input {name} is on {x.device}, and the params are on {here}. Pass x.to({str(here)!r}).")
            return
        if x.is_floating_point() and x.dtype not in computed and _DTYPES.search(text):
            dtype = computed[0]
            autocast = f", or replace compute= by fz.autocast(step, {dtype})" if dtype in _HALF else ""
            error.add_note(
                f"Input {name} is {x.dtype}, and the step computes with params in {dtype}. Cast the input: "
                f"x.to({dtype}){autocast}."
            )
            return
