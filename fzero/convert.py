"""fz.convert: a state of one step as a state of another one, over the same leaves."""

from __future__ import annotations

import json

import torch

from fzero.base import private, pytree
from fzero.base.arguments import need_bool, wrong
from fzero.checkpoint.contents import Copies, copies_of, need_same
from fzero.checkpoint.fill import Everyone
from fzero.comm import backend, pieces
from fzero.comm.axis import Axis
from fzero.formats.formats import ALIGN, Format
from fzero.state.check_state import check_same_optimizer
from fzero.state.checks import checksum, constants
from fzero.state.init import check_tables
from fzero.state.items import CARRY, items_of
from fzero.state.origin import Move, Origin
from fzero.state.sharded import Sharded, check_buffers, is_sharded
from fzero.state.sliced import Sliced, sliced_in
from fzero.state.train_state import TrainState
from fzero.table.layout import Key, Layout
from fzero.table.module_params import frozen_leaves, hints_of
from fzero.table.spec import Spec, need_step


def convert(state: TrainState, step: Spec, lossy: bool = False) -> TrainState:
    """Moves a state to another step: another policy, stage, mesh, units or frozen leaves, in the middle of a run.

    Both steps have the same leaves and optimizer. One unit at a time is moved, so no rank holds the full model. What
    both store alike keeps its bits. All ranks of both steps call it.

    - A leaf that `step` thaws begins with moments and count of zero. If it has kept its moments, it goes on with them.
    - Schedules and `state.step` go on.
    - Leaves that a module has frozen by `requires_grad=False` stay frozen. `fz.load(path, step, like=params)` changes
      that.

    Args:
        state: a state of another step, without kept grads.
        step: the step to go on with.
        lossy: True lets values be rounded to nearest. False raises an error instead. Moments of a leaf that `step`
            freezes are dropped in either case, unless it keeps them (`fz.freeze(..., keep_moments=True)`).

    Returns:
        A new state, for `step`.

    Raises:
        ValueError: values would be lost, with the leaf (use `lossy=True`); kept grads (call `step.update` first);
            another optimizer; ranks hold different params, or give steps over other ranks.

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
    with private.of_normal_tensors(), private.below_transforms():
        old = state.params
        _need_together(old.axis, step)
        specs = [(row.path, row.shape, row.dtype) for row in old.layout.rows]
        rows = step.rows(specs, frozen_leaves(old.structure), hints_of(old.structure))
        axis = step.axis()
        moves = axis != old.axis  # to other ranks
        axis = axis.of_component(step.name) if moves else axis.of_component_of(old.axis)
        origin = _State(state, sums=moves and Everyone(axis).count > 1)
        need_same(old.axis, origin.copies(), "convert")
        move = Move(origin, step, old.device, lossy, state.step)
        layout = Layout.build(rows, axis.size, axis.place_on_tensor)
        check_tables(step, layout, axis, f"update {state.step}, lossy {lossy}")
        params = move.held(move.params(layout, axis, old.structure, None))
        if moves:
            axis.check_same(
                "\n".join(origin.said),
                "The params",
                "They come from states of several components; start from one's fz.gather(state.params), with "
                "step.init(params, sync=True).",
            )
        check_same_optimizer("convert", step.optimizer, params)
        moments, extra = move.begun(params, overwritten=True)
        extra = move.extra(extra)
        if CARRY in extra:  # of which each rank has its own
            extra[CARRY] = pytree.map(lambda x: old.axis.broadcast(x.clone(), "the carry"), extra[CARRY])
        moments = move.moments(moments, layout)
        return TrainState(params, None, moments, extra, state.step, state.seed, step.signature)


def _need_together(axis: Axis, step: Spec) -> None:
    """Raises ValueError on every rank of a state where one's step would wait for ranks whose own does not."""
    axis.need_running()
    everyone = Everyone(axis)
    if everyone.count == 1:
        return
    new = step.axis()
    tensor = new.tensor.members if new.tensor is not None else ()
    said = json.dumps([backend.global_rank(), new.members, new.others, tensor, new.place])
    heard = [json.loads(text) for text in everyone.exchange(said, "convert")]
    for rank, *groups, place in heard:
        for other, *theirs, there in heard:
            if any(other in own and own != its for own, its in zip(groups, theirs, strict=True)):
                raise ValueError(
                    f"convert, step: rank {rank} got one over {place}, rank {other} one over {there}; expected the "
                    "same on both. Build the same step on every rank."
                )


_Full = dict[int, list[torch.Tensor]]  # rank on the tensor axis -> the full parts of a group, of its slices


class _State(Origin):
    """A state as the origin of another one, whose trees are gathered a unit at a time."""

    place, call = "convert: the state", "fz.convert(state, step, lossy=True)"
    anew = "step.init(fz.gather(state.params))"

    def __init__(self, state: TrainState, sums: bool) -> None:
        self._items = {item.name: item for item in items_of(state)}
        for name, value in self._items.values():
            if is_sharded(value):
                check_buffers("convert", f"state.{name}", value)
        self.device, self.extras = state.params.device, state.signature.extras
        self.kinds = {name: item.kind for name, item in self._items.items()}
        self.said: list[str] = []  # checksums of the params, which all ranks of the new state must have
        self._sums, self._gathered = sums, dict[tuple[str, Key], _Full]()
        self._layout, (_, ranks) = state.layout, state.layout.tensor
        own = self._layout
        self._layouts = [Layout.build(own.rows, own.shards, (rank, ranks)) for rank in range(ranks)]
        self._groups = {name: frozenset(x.groups) for name, x in self._items.values() if is_sharded(x)}

    def copies(self) -> Copies:
        """The checksums of what other ranks hold, too."""
        return copies_of({name: value for name, value in self._items.values() if is_sharded(value)})

    def scale(self, name: str) -> float:
        return self._items[name].value.scale

    def value(self, name: str) -> object:
        return self._items[name].value

    def format(self, name: str, path: str) -> Format | None:
        tree, (key, _) = self._items[name].value, self._layout.key_of[path]
        return tree.format(key) if key in self._groups[name] else None  # it was frozen

    def sliced(self, name: str, path: str) -> Sliced | None:
        return sliced_in(self._layout, self._layout.key_of[path][1].leaf)

    def read(self, name: str, path: str, start: int, stop: int, into: object, rank: int = 0) -> list[torch.Tensor]:
        own = self._layout.tensor[0]
        rank = rank if self.sliced(name, path) is not None else own
        key, slot = self._layouts[rank].key_of[path]
        full = self._full(name, key)
        if rank not in full:
            full |= self._others(name, key, full[own])
        low, high = slot.offset + start, slot.offset + -(-stop // ALIGN) * ALIGN
        parts = zip(self._items[name].value.format(key).parts, full[rank], strict=True)
        return [x[low // part.every : high // part.every] for part, x in parts]

    def _full(self, name: str, key: Key) -> _Full:
        """The full parts of a group, at least those of this rank's slices of the leaves."""
        if (name, key) not in self._gathered:
            near = lambda tree, other: tree == name and other.unit == key.unit
            self._gathered = {each: parts for each, parts in self._gathered.items() if near(*each)}
            tree, slots = self._items[name].value, self._layouts[0].groups[key].slots
            own = [tree.axis_of(key).gather(part, f"convert of {key}") for part in tree.stored(key).parts]
            full = self._gathered[name, key] = {self._layout.tensor[0]: own}
            if self._sums and name == "params":
                if any(sliced_in(self._layout, slot.leaf) is not None for slot in slots):
                    full |= self._others(name, key, own)
                sums = [checksum(part) for rank in sorted(full) for part in full[rank]]
                self.said.append(f"{slots[0].path} and others with checksums {sums}")
        return self._gathered[name, key]

    def _others(self, name: str, key: Key, own: list[torch.Tensor]) -> _Full:
        """The full parts of a group of which each rank has its slices, by rank."""
        tree: Sharded = self._items[name].value
        tensor, out = tree.axis.tensor, [list[torch.Tensor]() for _ in self._layouts]
        assert tensor is not None
        for part, x in zip(tree.format(key).parts, own, strict=True):
            sizes = [layout.groups[key].numel // part.every for layout in self._layouts]
            every = pieces.gathered(tensor, x, 0, sizes, f"convert of {key}")
            for rank, piece in enumerate(every.split(sizes)):
                out[rank].append(piece)
        return dict(enumerate(out))
