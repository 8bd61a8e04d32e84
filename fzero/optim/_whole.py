"""Optimizers that want whole leaves, under ZeRO: each leaf is updated by one rank, which has it for that time only."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fzero.base import private, pytree
from fzero.base.arguments import named
from fzero.base.follow import is_transformed
from fzero.comm.axis import Axis
from fzero.comm.pieces import start_exchange
from fzero.formats.formats import zeros
from fzero.kernels.onepass import math_dtype
from fzero.optim._join import members_of
from fzero.optim.base import values, write_values
from fzero.state.entered import slice_in
from fzero.state.owners import Leaves, everywhere, joined, owned, owners, start_slices, start_whole
from fzero.state.placing import placed
from fzero.state.sharded import Draw, Sharded, part_names
from fzero.stores.away import Buffer
from fzero.table.layout import Key, Slot
from fzero.table.needs import need_optimizer
from fzero.table.optimizer import GradientTransformation, Number

AHEAD = 1  # groups that are on their way to their owners while one is computed with


class Place:
    """In a leaf's state the place of a tensor of the leaf's shape, which lies in slices in the tree of that number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"Place({self.number})"


pytree.register(Place, lambda node: ((), node.number), lambda number, _: Place(number))


class WholeState(NamedTuple):
    """The states of all leaves.

    Attributes:
        trees: their tensors that are of the leaf's shape, in slices, as other optimizers' moments.
        rest: path -> the leaf's state, with a `Place` for each of them. Every rank has all other tensors.
    """

    trees: tuple[Sharded, ...]
    rest: dict[str, object]


def whole(optimizer: GradientTransformation) -> GradientTransformation:
    """Applies an optimizer to each leaf by itself, as `{path: leaf}`, and gives it the whole leaf also where it is cut.

    For what needs more than elements: norms of rows, factors, preconditioners, learned optimizers. Every leaf is
    brought to one rank, with its gradient and its state, updated there, and brought back in slices, one exchange in and
    one out for each group of leaves, while another group is computed with. What of its state has the leaf's shape is
    sharded, offloaded and saved as moments are; every rank has all the rest.

    Args:
        optimizer: any; what it does to one leaf must not depend on others. `init` and `update` keep structure, shapes
            and dtypes of a leaf's state. Its tensors are in float32, or float64 where params are.

    Raises:
        ValueError: one that clips by the norm of all leaves; that goes before: `fz.chain(fz.clip_by_global_norm(1.0),
            fz.whole(optimizer))`.

    Example:
        >>> def by_rows(grads, state, params):
        ...     return {path: -0.1 * g / g.norm(dim=-1, keepdim=True) for path, g in grads.items()}, state
        >>> optimizer = fz.whole(fz.GradientTransformation(lambda params: (), by_rows))
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), optimizer)
        >>> state, _ = step(step.init({"w": torch.zeros(2, 2)}), torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
        >>> fz.gather(state.params)["w"]
        tensor([[-0.0600, -0.0800],
                [ 0.0000, -0.1000]])
    """
    need_optimizer(optimizer, "whole")
    if any(member.needs == "norm" for member in members_of(optimizer)):
        raise ValueError(
            "whole: got an optimizer that clips by the norm of all leaves, expected one that treats each by itself. "
            "Clip before: fz.chain(fz.clip_by_global_norm(1.0), fz.whole(...))."
        )
    own = _Whole(optimizer)
    return GradientTransformation(
        own.init,
        own.update,
        own.fused,
        own.label,
        own.metrics if optimizer.metrics else None,
        by_leaf=True,
        needs="all",  # as all leaves' other tensors are told at the end
        exchanges=True,
    )


@dataclass(frozen=True)
class _Whole:
    optimizer: GradientTransformation

    def label(self, path: str) -> str:
        return f"whole {self.optimizer.label(path) if self.optimizer.label else 'optimizer'}"

    def metrics(self, old: WholeState) -> dict[str, Number]:
        assert self.optimizer.metrics is not None
        return self.optimizer.metrics(next(iter(old.rest.values()))) if old.rest else {}

    # ---- a leaf's state, apart and together

    def init(self, params: object) -> WholeState:
        if not isinstance(params, Sharded):
            names, leaves, _ = pytree.named_leaves(params)
            return WholeState((), {n: self.optimizer.init({n: x}) for n, x in zip(names, leaves, strict=True)})
        params = values(params)
        rest, trees = dict[str, object](), list[dict[Key, torch.Tensor]]()
        for key in params.groups:
            leaves, slots = everywhere(params, key), params.layout.groups[key].slots
            states = {slot.leaf: _flat(self.optimizer.init({slot.path: leaves[slot.leaf]})) for slot in slots}
            own = {leaf: _like_leaf(entries, leaves[leaf]) for leaf, (entries, _) in states.items()}
            for place in range(max([len(each) for each in own.values()])):
                those = {leaf: each[place] for leaf, each in own.items() if place < len(each)}
                if 2 * sum([leaves[leaf].numel() for leaf in those]) < sum([x.numel() for x in leaves.values()]):
                    continue  # slices of all the group would be zeros for most
                found = {leaf: torch.zeros_like(x) for leaf, x in leaves.items() if leaf not in those}
                for leaf, entry in those.items():
                    entries, x = states[leaf][0], states[leaf][0][entry]
                    assert isinstance(x, torch.Tensor)
                    found[leaf], entries[entry] = x.to(leaves[leaf].dtype), Place(place)
                trees += [{} for _ in range(place + 1 - len(trees))]
                trees[place][key] = slice_in(params, key, found, params.local(key).dtype)
            rest |= {slot.path: pytree.unflatten(states[slot.leaf][1], states[slot.leaf][0]) for slot in slots}
        said = "\n".join(f"{path}: {[_form(x) for x in _flat(state)[0]]}" for path, state in rest.items())
        params.axis.check_same(said, "fz.whole: the states of leaves", "Make the same of a leaf on every rank.")
        return WholeState(tuple([self._tree(params, found) for found in trees]), rest)

    def _tree(self, params: Sharded, found: Mapping[Key, torch.Tensor]) -> Sharded:
        empty = Sharded(params.layout, params.axis, params.structure, {}, kind="signed")
        if any(private.is_wrapped(x) for x in found.values()):
            return params.with_buffers(found)
        buffers: dict[object, Buffer] = {}
        for key, x in found.items():
            form = empty.format(key)
            tree = empty.over(dict(zip(part_names(form, key), zeros(form, x.numel(), x.device), strict=True)))
            write_values(tree, key, x, Draw(0, 0))
            buffers.update(placed(tree, "moments").entries)  # one group at a time
        return empty.over(buffers)

    def _of_leaf(
        self, slot: Slot, rest: object, g: torch.Tensor, p: torch.Tensor, own: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, object, list[torch.Tensor]]:
        """The update of a leaf, and its next state: what every rank has, and what the trees have.

        Args:
            own: what the trees have, in the order of their numbers.
        """
        path, (had, spec) = slot.path, _flat(rest)
        places = [i for i, x in enumerate(had) if isinstance(x, Place)]
        state = list(had)
        for i, x in zip(places, own, strict=False):
            state[i] = x
        updates, new = self.optimizer.update({path: g}, pytree.unflatten(spec, state), {path: p})
        update, (entries, now) = updates[path], _flat(new)
        if not isinstance(update, torch.Tensor) or update.shape != p.shape:
            raise ValueError(f"whole: the update of leaf {path!r} is {named(update)}, expected a tensor like the leaf.")
        pairs = enumerate(zip(state, entries, strict=True)) if spec == now else ()
        if spec != now or not all(_form(x, i in places) == _form(y, i in places) for i, (x, y) in pairs):
            raise ValueError(
                f"whole: the state of leaf {path!r} is {new} after an update, and was {rest}. A state keeps the "
                "structure, the shapes and the dtypes of what its init returned; start with zeros where there is "
                "nothing yet."
            )
        moved = [x for i in places if isinstance(x := entries[i], torch.Tensor)]
        for i in places:
            entries[i] = had[i]
        return update, pytree.unflatten(spec, entries), [*moved, *own[len(places) :]]

    # ---- all leaves

    def update(self, grads: object, old: WholeState, params: object) -> tuple[object, WholeState]:
        if not isinstance(grads, Sharded) or not isinstance(params, Sharded):
            names, leaves, spec = pytree.named_leaves(grads)
            pairs = list(zip(names, leaves, pytree.leaves(params), strict=True))
            found = {n: self.optimizer.update({n: g}, old.rest[n], {n: p}) for n, g, p in pairs}
            updates = pytree.unflatten(spec, [found[name][0][name] for name in names])
            return updates, WholeState((), {name: found[name][1] for name in names})
        if not is_transformed():
            run, buffers = (
                _Run(self, params, grads, old),
                [dict[Key, torch.Tensor]() for _ in range(len(old.trees) + 1)],
            )
            for key, made in run.made():
                for place, x in zip(run.places(key), made, strict=True):
                    buffers[place][key] = x
            trees = [grads.with_buffers(each, 1.0) for each in buffers]
            return trees[0], WholeState(tuple(trees[1:]), run.told())
        return self._everywhere(grads, old, params)

    def _everywhere(self, grads: Sharded, old: WholeState, params: Sharded) -> tuple[Sharded, WholeState]:
        """The same on every rank, as a transform may go on through it."""
        rest, buffers = dict(old.rest), [dict[Key, torch.Tensor]() for _ in range(len(old.trees) + 1)]
        for key in grads.groups:
            own = [i for i, tree in enumerate(old.trees) if key in tree.groups]
            whole = [everywhere(tree, key) for tree in (grads, params, *[old.trees[i] for i in own])]
            made: list[Leaves] = [{} for _ in range(len(own) + 1)]
            for slot in grads.layout.groups[key].slots:
                g, p, *state = [each[slot.leaf] for each in whole]
                update, rest[slot.path], new = self._of_leaf(slot, rest[slot.path], g, p, state)
                for leaves, x in zip(made, (update, *new), strict=True):
                    leaves[slot.leaf] = x
            for place, leaves in zip((0, *[i + 1 for i in own]), made, strict=True):
                buffers[place][key] = slice_in(grads, key, leaves, grads.local(key).dtype)
        trees = [grads.with_buffers(each) for each in buffers]
        return trees[0], WholeState(tuple(trees[1:]), rest)

    def fused(self, params: object, grads: Sharded, old: WholeState) -> WholeState:
        if not isinstance(params, Sharded):
            updates, new = self.update(grads, old, params)
            pytree.map(torch.Tensor.add_, params, updates)
            return new
        run, draw = _Run(self, params, grads, old), params.draw or Draw(0, 0)
        for key, (update, *new) in run.made():
            write_values(params, key, params.local(key).to(update.dtype) + update, draw)
            for tree, x in zip(run.trees(key), new, strict=True):
                write_values(tree, key, x, draw)
        return WholeState(old.trees, run.told())


class _Run:
    """One update in place: what its owners have computed of the leaves."""

    def __init__(self, own: _Whole, params: Sharded, grads: Sharded, old: WholeState) -> None:
        self.own, self.params, self.grads, self.old = own, params, grads, old
        self.rest = dict(old.rest)
        self.error: Exception | None = None

    def _dtype(self, key: Key) -> torch.dtype:
        return math_dtype(self.params.format(key).dtype)

    def places(self, key: Key) -> list[int]:
        """The numbers of what is computed of a group: 0, and from 1 on of the trees that have it."""
        return [0, *[i for i, tree in enumerate(self.old.trees, 1) if key in tree.groups]]

    def trees(self, key: Key) -> list[Sharded]:
        return [tree for tree in self.old.trees if key in tree.groups]

    def made(self) -> Iterator[tuple[Key, list[torch.Tensor]]]:
        """Of each group this rank's slices of the updates and of the trees, others being on their way meanwhile."""
        todo = list(self.params.groups)
        coming = collections.deque[Callable[[], list[Leaves]]]()
        going: tuple[Key, Callable[[], list[Leaves]]] | None = None
        for place, key in enumerate(todo):
            while len(coming) <= AHEAD and place + len(coming) < len(todo):
                coming.append(self._start(todo[place + len(coming)]))
            started = key, self._compute(key, coming.popleft()())
            if going is not None:
                yield self._joined(*going)
            going = started
        if going is not None:
            yield self._joined(*going)

    def _joined(self, key: Key, wait: Callable[[], list[Leaves]]) -> tuple[Key, list[torch.Tensor]]:
        like = self.params.local(key).new_empty(0, dtype=self._dtype(key))
        return key, [joined(self.params, key, pieces, like) for pieces in wait()]

    def _start(self, key: Key) -> Callable[[], list[Leaves]]:
        trees, dtype = [self.grads, self.params, *self.trees(key)], self._dtype(key)
        slices = [values(tree.only([key])).local(key).to(dtype) for tree in trees]
        return start_whole(self.params, key, slices, "whole leaves")

    def _compute(self, key: Key, whole: Sequence[Leaves]) -> Callable[[], list[Leaves]]:
        """Updates this rank's own leaves of a group, and begins to bring the slices back."""
        made: list[Leaves] = [{} for _ in whole[1:]]
        for slot in owned(self.params, key):
            g, p, *state = [each[slot.leaf] for each in whole]
            try:
                update, self.rest[slot.path], new = self.own._of_leaf(slot, self.rest[slot.path], g, p, state)
            except Exception as error:  # the others wait for what would have come of it
                error.add_note(f"This was in the update of leaf {slot.path!r}, by fz.whole.")
                self.error, update, new = self.error or error, torch.zeros_like(p), state
            for leaves, x in zip(made, (update, *new), strict=True):
                leaves[slot.leaf] = x.to(self._dtype(key))
        like = torch.empty(0, dtype=self._dtype(key), device=self.grads.device)
        return start_slices(self.params, key, made, like, "updates of leaves")

    def told(self) -> dict[str, object]:
        """The rest of all leaves' states, each from its owner, and errors of any rank."""
        params, axis = self.params, self.params.axis
        cut = [key for key in params.groups if params.axis_of(key).size > 1]
        slots = [(owners(params.layout, key)[s.leaf], s) for key in cut for s in params.layout.groups[key].slots]
        if axis.size > 1:
            numbers = {s.path: _numbers(self.rest[s.path]) for rank, s in slots if rank == axis.rank}
            said = {"error": self.error and f"{type(self.error).__name__}: {self.error}", "numbers": numbers}
            heard = [json.loads(text) for text in axis.exchange(json.dumps(said), "the update by fz.whole")]
            errors = {rank: each["error"] for rank, each in enumerate(heard) if each["error"]}
            if errors and self.error is None:
                rank, text = next(iter(errors.items()))
                raise RuntimeError(f"step.update: rank {rank}'s part of an update by fz.whole failed: {text}")
            tensors = _exchanged(axis, [(rank, _tensors(self.rest[s.path])) for rank, s in slots])
            for (rank, slot), own in zip(slots, tensors, strict=True):
                told = (
                    heard[rank]["numbers"].get(slot.path, []) if rank != axis.rank else _numbers(self.rest[slot.path])
                )
                self.rest[slot.path] = _with(self.rest[slot.path], own, told)
        if self.error is not None:
            raise self.error
        return self.rest


def _exchanged(axis: Axis, states: Sequence[tuple[int, list[torch.Tensor]]]) -> list[list[torch.Tensor]]:
    """Tensors that each one rank has, on every rank: all have others of the same shapes and dtypes."""
    sizes = [sum([x.nbytes for rank, own in states if rank == r for x in own]) for r in range(axis.size)]
    if not any(sizes):
        return [own for _, own in states]
    device = next(x.device for _, own in states for x in own)
    mine = [x.contiguous().reshape(-1).view(torch.uint8) for rank, own in states if rank == axis.rank for x in own]
    flat = torch.cat(mine) if mine else torch.empty(0, dtype=torch.uint8, device=device)
    receive = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    start_exchange(axis, [flat] * axis.size, receive, "states of leaves")()
    at, out = [0] * axis.size, []
    for rank, own in states:
        found = []
        for x in own:
            part = receive[rank][at[rank] : at[rank] + x.nbytes].clone()  # where it is aligned for its dtype
            at[rank] += x.nbytes
            found.append(part.view(x.dtype).view(x.shape))
        out.append(found)
    return out


# ---- a leaf's state


def _is_entry(node: object) -> bool:
    return isinstance(node, (Place, pytree.Count))


def _flat(state: object) -> tuple[list[object], pytree.Spec]:
    return pytree.flatten(state, is_leaf=_is_entry)


def _like_leaf(entries: Sequence[object], leaf: torch.Tensor) -> list[int]:
    """Which entries of a leaf's state are tensors of its shape."""
    found = [(i, x) for i, x in enumerate(entries) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return [i for i, x in found if x.shape == leaf.shape and x.ndim]


def _form(entry: object, in_slices: bool = False) -> object:
    """What an update keeps of an entry."""
    if isinstance(entry, torch.Tensor):
        return tuple(entry.shape), None if in_slices else entry.dtype
    if isinstance(entry, Place):
        return f"in slices, {entry.number}"
    return type(entry) if isinstance(entry, (int, float, pytree.Count)) else entry


def _tensors(rest: object) -> list[torch.Tensor]:
    return [x for x in _flat(rest)[0] if isinstance(x, torch.Tensor)]


def _numbers(rest: object) -> list[float]:
    entries = [x.value if isinstance(x, pytree.Count) else x for x in _flat(rest)[0]]
    return [x for x in entries if isinstance(x, (int, float))]


def _with(rest: object, tensors: Sequence[torch.Tensor], numbers: Sequence[float]) -> object:
    """A leaf's state with other tensors and numbers in the places of its own."""
    entries, spec = _flat(rest)
    left, told = iter(tensors), iter(numbers)
    for i, x in enumerate(entries):
        if isinstance(x, torch.Tensor):
            entries[i] = next(left)
        elif isinstance(x, pytree.Count):
            entries[i] = pytree.Count(int(next(told)))
        elif isinstance(x, (int, float)):
            entries[i] = next(told)
    return pytree.unflatten(spec, entries)
