"""Optimizers that want whole leaves, under ZeRO: each leaf is updated by one rank, which has it for that time only."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fzero.base import pytree
from fzero.base.arguments import named
from fzero.base.follow import is_transformed
from fzero.base.random import Seeds, seeded
from fzero.base.rebound import is_others
from fzero.kernels.onepass import math_dtype
from fzero.optim._join import members_of
from fzero.optim._leaf_states import (
    Place,
    exchanged,
    flat,
    form,
    like_leaf,
    numbers_of,
    said_of,
    tensors_of,
    with_others,
)
from fzero.optim.base import values, write_values
from fzero.state.entered import slice_in
from fzero.state.owners import Leaves, everywhere, joined, owned, owners, start_slices, start_whole
from fzero.state.sharded import Draw, Sharded
from fzero.table.layout import Key, Slot
from fzero.table.needs import need_optimizer
from fzero.table.optimizer import GradientTransformation, Number, Whole

AHEAD = 1  # groups that are on their way to their owners while one is computed with


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
    one out for each group of leaves, while another group is computed with. What of its state has the shape of a matrix,
    or of a large vector, is sharded, offloaded and saved as moments are; every rank has all the rest. Its metrics are
    left out.

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
        own.metrics if optimizer.metrics and not is_others(optimizer.metrics) else None,
        by_leaf=True,
        needs="all",  # as all leaves' other tensors are told at the end
        exchanges=True,
        sends=own.sends,
    )


@dataclass(frozen=True)
class _Whole:
    optimizer: GradientTransformation

    def label(self, path: str) -> str:
        return f"whole {self.optimizer.label(path) if self.optimizer.label else 'optimizer'}"

    def metrics(self, old: WholeState) -> dict[str, Number]:
        assert self.optimizer.metrics is not None
        return self.optimizer.metrics(next(iter(old.rest.values()))) if old.rest else {}

    def sends(self, params: Sharded, old: WholeState) -> Sequence[Mapping[Key, Whole]]:
        found = dict[Key, Whole]()
        for key in params.groups:
            trees, cut = sum(key in tree.groups for tree in old.trees), params.layout.groups[key].row.cuts
            rest = {slot.leaf: tensors_of(old.rest[slot.path]) for slot in params.layout.groups[key].slots if cut}
            told = {leaf: sum(x.nbytes for x in own) for leaf, own in rest.items()}
            found[key] = Whole(2 + trees, 1 + trees, math_dtype(params.format(key).dtype).itemsize, told)
        return [found]

    # ---- a leaf's state, apart and together

    def init(self, params: object) -> WholeState:
        if not isinstance(params, Sharded):
            names, leaves, _ = pytree.named_leaves(params)
            return WholeState((), {n: self.optimizer.init({n: x}) for n, x in zip(names, leaves, strict=True)})
        params = values(params)
        rest, trees = dict[str, object](), list[dict[Key, torch.Tensor]]()
        for key in params.groups:
            leaves, slots = everywhere(params, key), params.layout.groups[key].slots
            parts: list[Leaves] = []
            for slot in slots:
                leaf = leaves[slot.leaf].clone()  # of which it may keep a part
                with seeded(Seeds(0, slot.leaf).next()):  # the same on every rank
                    entries, spec = flat(self.optimizer.init({slot.path: leaf}))
                for place, entry in enumerate(like_leaf(entries, leaf)):
                    parts += [{} for _ in range(place + 1 - len(parts))]
                    x = entries[entry]
                    assert isinstance(x, torch.Tensor)
                    parts[place][slot.leaf], entries[entry] = x.to(leaf.dtype), Place(place)
                rest[slot.path] = pytree.unflatten(spec, entries)
            trees += [{} for _ in range(len(parts) - len(trees))]
            for found, own in zip(trees, parts, strict=False):
                own = {leaf: own.get(leaf, torch.zeros_like(x)) for leaf, x in leaves.items()}
                found[key] = slice_in(params, key, own, params.local(key).dtype).clone()  # no view, as it is written
        for found in trees:  # all have all groups, whatever leaves are in one, so that a state goes into other units
            for key in params.groups:
                found.setdefault(key, torch.zeros_like(params.local(key)))
                row = params.layout.groups[key].row
                if isinstance(row.policy.moment, str):
                    raise ValueError(
                        f"params[{row.path!r}]: its policy stores moments as {row.policy.moment!r}, which fz.whole "
                        "cannot carry: nothing says which of its optimizer's tensors may be negative. Give moment= a "
                        "dtype."
                    )
        said = "\n".join(f"{path}: {list(map(said_of, flat(state)[0]))}" for path, state in rest.items())
        params.axis.check_same(said, "fz.whole: the states of leaves", "Make the same of a leaf on every rank.")
        return WholeState(tuple([params.with_buffers(found) for found in trees]), rest)

    def _of_leaf(
        self,
        slot: Slot,
        rest: object,
        g: torch.Tensor,
        p: torch.Tensor,
        own: Sequence[torch.Tensor],
        seed: tuple[int, ...],
    ) -> tuple[torch.Tensor, object, list[torch.Tensor]]:
        """The update of a leaf, and its next state: what every rank has, and what the trees have.

        Args:
            own: what the trees have, in the order of their numbers.
            seed: of everything random in this update.
        """
        path, (had, spec) = slot.path, flat(rest)
        places = [i for i, x in enumerate(had) if isinstance(x, Place)]
        state = [x.clone() if isinstance(x, torch.Tensor) else x for x in had]  # which it may write to, or keep
        for i, x in zip(places, own, strict=False):
            state[i] = x.clone()
        g, p = g.clone(), p.clone()
        with seeded(Seeds(*seed, slot.leaf).next()):  # so that whoever updates this leaf draws the same
            found = self.optimizer.update({path: g}, pytree.unflatten(spec, state), {path: p})
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], Mapping) or path not in found[0]:
            raise ValueError(
                f"whole: the update of leaf {path!r} is {named(found)}, expected a pair ({{{path!r}: a tensor like the "
                "leaf}, the next state)."
            )
        updates, new = found
        update, (entries, now) = updates[path], flat(new)
        if not isinstance(update, torch.Tensor) or update.shape != p.shape:
            raise ValueError(f"whole: the update of leaf {path!r} is {named(update)}, expected a tensor like the leaf.")
        pairs = enumerate(zip(state, entries, strict=True)) if spec == now else ()
        if spec != now or not all(form(x, i in places) == form(y, i in places) for i, (x, y) in pairs):
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
            run, count = _Run(self, params, grads, old), len(old.trees) + 1
            buffers = [dict[Key, torch.Tensor]() for _ in range(count)]
            for key, made in run.made():
                for place, x in zip(run.places(key), made, strict=True):
                    buffers[place][key] = x
            trees = [grads.with_buffers(each, 1.0) for each in buffers]
            return trees[0], WholeState(tuple(trees[1:]), run.told())
        return self._everywhere(grads, old, params)

    def _everywhere(self, grads: Sharded, old: WholeState, params: Sharded) -> tuple[Sharded, WholeState]:
        """The same on every rank, as a transform may go on through it."""
        rest, seed = dict(old.rest), _seed_of(params)
        buffers = [dict[Key, torch.Tensor]() for _ in range(len(old.trees) + 1)]
        for key in grads.groups:
            own = [i for i, tree in enumerate(old.trees) if key in tree.groups]
            whole = [everywhere(tree, key) for tree in (grads, params, *[old.trees[i] for i in own])]
            made: list[Leaves] = [{} for _ in range(len(own) + 1)]
            for slot in grads.layout.groups[key].slots:
                g, p, *state = [each[slot.leaf] for each in whole]
                update, rest[slot.path], new = self._of_leaf(slot, rest[slot.path], g, p, state, seed)
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
                update, self.rest[slot.path], new = self.own._of_leaf(
                    slot, self.rest[slot.path], g, p, state, _seed_of(self.params)
                )
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
        failed = self.error and f"{type(self.error).__name__}: {self.error}"
        over = axis.tensor
        if over is not None and over.size > 1:  # whose ranks have the same leaves
            heard = over.exchange(json.dumps(failed), "the update by fz.whole")
            failed = failed or next((text for text in map(json.loads, heard) if text), None)
        if failed and axis.size == 1:
            raise self.error or _elsewhere(failed)
        if axis.size > 1:
            numbers = {s.path: numbers_of(self.rest[s.path]) for rank, s in slots if rank == axis.rank}
            said = {"error": failed, "numbers": numbers}
            heard = [json.loads(text) for text in axis.exchange(json.dumps(said), "the update by fz.whole")]
            errors = {rank: each["error"] for rank, each in enumerate(heard) if each["error"]}
            if errors:  # on every rank, before anything else is exchanged
                raise self.error or _elsewhere(next(iter(errors.values())))
            tensors = exchanged(axis, [(rank, tensors_of(self.rest[s.path])) for rank, s in slots])
            for (rank, slot), own in zip(slots, tensors, strict=True):
                if rank != axis.rank:
                    self.rest[slot.path] = with_others(self.rest[slot.path], own, heard[rank]["numbers"][slot.path])
        return self.rest


def _elsewhere(said: str) -> RuntimeError:
    return RuntimeError(f"step.update: another rank's part of an update by fz.whole failed: {said}")


def _seed_of(params: Sharded) -> tuple[int, ...]:
    draw = params.draw or Draw(0, 0)
    return draw.seed, draw.count
