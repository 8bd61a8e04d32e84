"""fz.convert: a state of one step as a state of another one, over the same leaves."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fzero.base import private, pytree
from fzero.base.arguments import need_bool, wrong
from fzero.base.interrupts import as_found
from fzero.formats.formats import ALIGN, decode, encode, zeros
from fzero.state.checks import constants
from fzero.state.init import as_held, checksum
from fzero.state.moments import init_extras, init_moments
from fzero.state.placing import settle
from fzero.state.sharded import Sharded, is_sharded, part_names
from fzero.state.train_state import TrainState
from fzero.stores.away import Buffer, tensor_of
from fzero.table.layout import Key, Layout
from fzero.table.module_params import frozen_leaves
from fzero.table.spec import Spec, need_step


def convert(state: TrainState, step: Spec, lossy: bool = False) -> TrainState:
    """The state in the formats, units and sharding of `step`, whose leaves and optimizer are the same.

    Params and moments are moved one unit at a time, so no rank holds the full model. What is stored alike is moved as
    it is; otherwise values are decoded, and rounded to nearest.

    Args:
        state: of another step, without kept grads.
        step: whose policy, units, sharding or frozen leaves differ.
        lossy: whether values may be rounded; otherwise a leaf that would be is an error.

    Raises:
        ValueError: something would be lost, and what; kept grads; moments of another optimizer; the step's ranks hold
            different params.

    Example:
        >>> plain = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.adamw(0.1))
        >>> small = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.adamw(0.1), fz.Policy.exact(torch.float32))
        >>> state = fz.convert(plain.init({"w": torch.ones(3)}), small)
        >>> fz.gather(state.params)["w"], state.params.stored(state.params.groups[0]).parts[1].dtype
        (tensor([1., 1., 1.]), torch.int16)
    """
    need_step(step, "convert")
    need_bool(lossy, "convert", "lossy")
    if not isinstance(state, TrainState):
        raise wrong("convert", "state", state, "what step.init returned")
    (state,) = constants("fz.convert", state=state)
    if state.grads is not None:
        raise ValueError("convert: the state keeps grads of add_grads. Apply them first, with step.update.")
    with as_found(), private.of_normal_tensors(), private.below_transforms():
        params = _params(state.params, step, lossy)
        moments = _filled(
            state.moments, init_moments(step, params), lossy, "moments of another optimizer than the step's", "moments"
        )
        extra = _extras(state, step, params, lossy)
        return TrainState(params, None, moments, extra, state.step, state.seed, step.signature)


def _params(old: Sharded, step: Spec, lossy: bool) -> Sharded:
    rows = step.rows([(row.path, row.shape, row.dtype) for row in old.layout.rows], frozen_leaves(old.structure))
    axis = step.axis()
    moves = axis != old.axis  # to other ranks
    axis = axis.of_component(step.name) if moves else axis.of_component_of(old.axis)
    layout = Layout.build(rows, axis.size)
    held: dict[Key, Buffer] = {}
    said: list[str] = []
    new = Sharded(layout, axis, old.structure, {}, kind="params")
    if not lossy:
        _refuse_losses(old, new, layout.groups)
    source, buffers = _Source(old), {}
    for key, group in layout.groups.items():
        policy = group.row.policy
        parts = source.parts(new, key)
        if moves and axis.ranks > 1:
            said.append(f"{group.slots[0].path} and others with checksums {[checksum(part) for part in parts]}")
        if group.row.held:
            held[key] = settle(new, key, "params", as_held(policy, parts))
        if group.row.beside:
            buffers.update(_own(new, key, parts, "params"))
    if moves:
        axis.check_same(
            "\n".join(said),
            "The params",
            "They come from states of several components; start from one's fz.gather(state.params), with "
            "step.init(params, sync=True).",
        )
    return new.replaced(buffers=buffers, held=held)


def _extras(state: TrainState, step: Spec, params: Sharded, lossy: bool) -> dict[str, object]:
    """The entries that both steps keep alike as they are, and those that only the new one keeps at their beginning."""
    kinds, before = ({name: kind for name, kind, _ in each.extras} for each in (step.signature, state.signature))
    lost = [name for name, kind, expendable in state.signature.extras if kinds.get(name) != kind and not expendable]
    if lost and not lossy:
        raise ValueError(
            f"convert: the state keeps state.extra[{lost[0]!r}] of {before[lost[0]]}, which the step does not. Say "
            "fz.convert(state, step, lossy=True) to drop it, or use a step with the same transforms."
        )
    return {
        name: _filled(state.extra[name], value, lossy, f"a state.extra[{name!r}] of another structure than the step's")
        if before.get(name) == kinds[name]
        else value
        for name, value in init_extras(step, params).items()
    }


def _filled(old: object, new: object, lossy: bool, otherwise: str, kind: str | None = None) -> object:
    """The new trees filled with the old ones' values; what is not a tree (a count) stays.

    Args:
        kind: of state, where a row says in which memory it lies.
        otherwise: what the state has where the structures differ, for the error.
    """
    (befores, spec), (afters, own) = (pytree.flatten(tree, is_leaf=is_sharded) for tree in (old, new))
    if spec != own or [*map(is_sharded, befores)] != [*map(is_sharded, afters)]:
        raise ValueError(
            f"convert: the state has {otherwise}. Convert to a step with what it was made with, or start from "
            "fz.gather(state.params) with step.init."
        )
    out = []
    for before, after in zip(befores, afters, strict=True):
        if is_sharded(before):
            if not lossy:
                _refuse_losses(before, after, after.groups)
            source = _Source(before)
            parts = [_own(after, key, source.parts(after, key), kind) for key in after.groups]
            before = after.over({name: part for own in parts for name, part in own.items()})
        out.append(before)
    return pytree.unflatten(spec, out)


def _own(tree: Sharded, key: Key, parts: list[torch.Tensor], kind: str | None) -> dict[object, Buffer]:
    """This rank's buffers of a group, by their names, from its full parts; in the memory for a kind of state."""
    size, rank = tree.layout.groups[key].shards, tree.axis.rank
    own: list[Buffer] = [part.chunk(size)[rank].clone() if size > 1 else part for part in parts]
    if kind is not None:
        own = [settle(tree, key, kind, tensor_of(part)) for part in own]
    return dict(zip(part_names(tree.format(key), key), own, strict=True))


class _Source:
    """Full leaves of an old tree, gathered a group at a time."""

    def __init__(self, tree: Sharded) -> None:
        self.tree = tree
        self._gathered: dict[Key, list[torch.Tensor]] = {}

    def _full(self, key: Key) -> list[torch.Tensor]:
        """The full parts of an old group."""
        if key not in self._gathered:
            self._gathered = {own: parts for own, parts in self._gathered.items() if own.unit == key.unit}
            self._gathered[key] = _gathered_parts(self.tree, key)
        return self._gathered[key]

    def parts(self, new: Sharded, key: Key) -> list[torch.Tensor]:
        """The full parts of a new group; leaves that were frozen keep what the new tree has, or are zero."""
        group, form, keys = new.layout.groups[key], new.format(key), self.tree.groups
        places = [(slot, *self.tree.layout.key_of[slot.path]) for slot in group.slots]
        if all(old_key in keys for _, old_key, _ in places):
            out = list(zeros(form, group.numel, self.tree.device))
        else:  # one was frozen
            out = _gathered_parts(new, key)
        for slot, old_key, old in places:
            if old_key not in keys:
                continue
            numel, have = -(-slot.numel // ALIGN) * ALIGN, self.tree.format(old_key)
            taken = [
                full[old.offset // part.every : (old.offset + numel) // part.every]
                for part, full in zip(have.parts, self._full(old_key), strict=True)
            ]
            if have.parts != form.parts:
                wide = torch.float64 if form.parts[0].dtype == torch.float64 else torch.float32
                taken = list(encode(form, decode(have, taken, wide)))
            for part, target, value in zip(form.parts, out, taken, strict=True):
                target[slot.offset // part.every : (slot.offset + numel) // part.every] = value
        return out


def _gathered_parts(tree: Sharded, key: Key) -> list[torch.Tensor]:
    return [tree.axis_of(key).gather(part, f"convert of {key}") for part in tree.stored(key).parts]


def _refuse_losses(old: Sharded, new: Sharded, keys: Iterable[Key]) -> None:
    for slot, form in [(slot, new.format(key)) for key in keys for slot in new.layout.groups[key].slots]:
        old_key, _ = old.layout.key_of[slot.path]
        if old_key in old.groups and not form.keeps(have := old.format(old_key)):
            what = "params" if new.kind == "params" else "moments"
            raise ValueError(
                f"convert: the {what} of leaf {slot.path!r} are stored as {have}, and would be rounded to {form}. Say "
                "fz.convert(state, step, lossy=True) to round them to nearest, or use a step whose policy keeps them, "
                "such as fz.Policy.exact()."
            )
