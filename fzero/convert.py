"""fz.convert: a state of one step as a state of another one, over the same leaves."""

from __future__ import annotations

from typing import Any

import torch

from fzero.base import private, pytree
from fzero.base.arguments import need_bool, wrong
from fzero.formats.formats import ALIGN, Format, decode, encode, zeros
from fzero.state.constants import constants
from fzero.state.init import as_held, checksum
from fzero.state.moments import init_extras, init_moments
from fzero.state.sharded import Sharded, is_sharded, part_names
from fzero.state.train_state import TrainState
from fzero.table.layout import Key, Layout
from fzero.table.module_params import frozen_leaves
from fzero.table.needs import need_step
from fzero.table.spec import Spec


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
        >>> fz.gather(state.params)["w"], state.params.stored(state.params.keys[0]).parts[1].dtype
        (tensor([1., 1., 1.]), torch.int16)
    """
    need_step(step, "convert")
    need_bool(lossy, "convert", "lossy")
    if not isinstance(state, TrainState):
        raise wrong("convert", "state", state, "what step.init returned")
    state = constants("fz.convert", "state", state)
    if state.grads is not None:
        raise ValueError("convert: the state keeps grads of add_grads. Apply them first, with step.update.")
    with private.below_transforms():
        return _converted(state, step, lossy)


def _converted(state: TrainState, step: Spec, lossy: bool) -> TrainState:
    old = state.params
    rows = step.rows([(row.path, row.shape, row.dtype) for row in old.layout.rows], frozen_leaves(old.structure))
    axis = step.axis()
    moves = axis != old.axis  # to other ranks
    label = getattr(step.fn, "__name__", type(step.fn).__name__)
    axis = axis.of_component(label) if moves else axis.of_component_of(old.axis)
    layout = Layout.build(rows, axis.size)
    buffers: dict[object, torch.Tensor] = {}
    held: dict[object, torch.Tensor] = {}
    said: list[str] = []
    if not lossy:
        _refuse_losses(old, layout)
    source = _Source(old)
    for key, group in layout.groups.items():
        policy = group.row.policy
        form = policy.param_format
        parts = source.parts(layout, key, form)
        own = _own(parts, axis.rank, group.shards)
        if moves and axis.ranks > 1:
            said.append(f"{group.slots[0].path} and others with checksums {[checksum(part) for part in parts]}")
        if group.row.held:
            held[key] = as_held(policy, parts)
            if policy.computes_as_stored:
                continue
        buffers.update(zip(part_names(form, key), own, strict=True))
    if moves:
        axis.check_same(
            "\n".join(said),
            "The params",
            "They come from states of several components; start from one's fz.gather(state.params), with "
            "step.init(params, sync=True).",
        )
    params = Sharded(layout, axis, old.structure, buffers, held, kind="params")
    moments = _filled(state.moments, init_moments(step, params), lossy)
    extra = _extras(state, step, params, lossy)
    return TrainState(params, None, moments, extra, state.step, state.seed, step.signature)


def _extras(state: TrainState, step: Spec, params: Sharded, lossy: bool) -> dict[str, object]:
    """What both steps keep alike, as it is; what only the new one keeps, at its beginning."""
    kinds, before = ({name: kind for name, kind, _ in each[2]} for each in (step.signature, state.signature))
    lost = [name for name, kind, expendable in state.signature[2] if kinds.get(name) != kind and not expendable]
    if lost and not lossy:
        raise ValueError(
            f"convert: the state keeps state.extra[{lost[0]!r}] of {before[lost[0]]}, which the step does not. Say "
            "fz.convert(state, step, lossy=True) to drop it, or use a step with the same transforms."
        )
    return {
        name: _filled(state.extra[name], value, lossy) if before.get(name) == kinds[name] else value
        for name, value in init_extras(step, params).items()
    }


def _filled(old: Any, new: Any, lossy: bool) -> Any:
    """The new trees filled with the old ones' values; what is not a tree (a count) stays."""

    def one(before: Any, after: Any) -> Any:
        if not is_sharded(before):
            return before
        if not lossy:
            _refuse_losses(before, after.layout, after)
        source, buffers = _Source(before), {}
        for key in after.keys:
            form = after.format(key)
            start = None
            if any(before.layout.key_of[slot.path][0] not in before.keys for slot in after.layout.groups[key].slots):
                parts = after.stored(key).parts  # it was frozen
                start = [after.axis_of(key).gather(part, f"convert of {key}") for part in parts]
            full = source.parts(after.layout, key, form, start)
            own = _own(full, after.axis.rank, after.layout.groups[key].shards)
            buffers.update(zip(part_names(form, key), own, strict=True))
        return after.over(buffers)

    try:
        return pytree.map(one, old, new, is_leaf=is_sharded)
    except (TypeError, ValueError) as error:
        if "convert" in str(error):
            raise
        raise ValueError(
            "convert: the state has moments of another optimizer than the step's. Convert to a step with the optimizer "
            "that it was made with, or start from fz.gather(state.params) with step.init."
        ) from error


def _own(parts: list[torch.Tensor], rank: int, size: int) -> list[torch.Tensor]:
    return [part.chunk(size)[rank].clone() if size > 1 else part for part in parts]


class _Source:
    """Full leaves of an old tree, gathered a group at a time."""

    def __init__(self, tree: Sharded) -> None:
        self.tree = tree
        self._gathered: dict[Any, list[torch.Tensor]] = {}

    def _full(self, key: Key) -> list[torch.Tensor]:
        """The full parts of an old group."""
        if key not in self._gathered:
            unit = self.tree.layout.groups[key].unit
            self._gathered = {k: v for k, v in self._gathered.items() if self.tree.layout.groups[k].unit == unit}
            parts = self.tree.stored(key).parts
            self._gathered[key] = [self.tree.axis_of(key).gather(part, f"convert of {key}") for part in parts]
        return self._gathered[key]

    def parts(
        self, layout: Layout, key: Key, form: Format, start: list[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """The full parts of a new group; `start` has those of leaves that the old tree does not have, or zeros do."""
        group = layout.groups[key]
        device = next(iter(self.tree.locals().values())).device if self.tree.keys else "cpu"
        out = start or list(zeros(form, group.numel, device))
        for slot in group.slots:
            old_key, old = self.tree.layout.key_of[slot.path]
            if old_key not in self.tree.keys:  # it was frozen
                continue
            numel = -(-slot.numel // ALIGN) * ALIGN
            have = self.tree.format(old_key)
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


def _refuse_losses(old: Sharded, layout: Layout, new: Sharded | None = None) -> None:
    for key, group in layout.groups.items():
        if new is not None and key not in new.keys:
            continue
        form = new.format(key) if new is not None else group.row.policy.param_format
        for slot in group.slots:
            old_key, _ = old.layout.key_of[slot.path]
            if old_key in old.keys and not form.keeps(have := old.format(old_key)):
                what = "params" if new is None else "moments"
                raise ValueError(
                    f"convert: the {what} of leaf {slot.path!r} are stored as {have}, and would be rounded to {form}. "
                    "Say fz.convert(state, step, lossy=True) to round them to nearest, or use a step whose policy "
                    "keeps them, such as fz.Policy.exact()."
                )
