"""Optimizers that want whole leaves, under ZeRO: each leaf is updated by one rank, which has it for that time only."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from fzero.base import private, pytree
from fzero.base.arguments import named
from fzero.base.follow import is_transformed
from fzero.base.random import Seeds, seeded
from fzero.base.rebound import is_others
from fzero.comm.axis import Axis
from fzero.kernels.onepass import math_dtype
from fzero.optim._leaf_states import (
    Place,
    changed,
    exchanged,
    flat,
    is_alike,
    like_leaf,
    need_kept,
    need_whole_leaves,
    numbers_of,
    of_leaf,
    said_of,
    tensors_of,
    with_others,
)
from fzero.optim._paused import Steps, run_all, together
from fzero.optim.base import keywords_of, transformation_of, values, write_values
from fzero.state.moments import copied
from fzero.state.owners import Leaves, everywhere, joined, on_every_rank, owned, owners, start_slices, start_whole
from fzero.state.sharded import Draw, Sharded
from fzero.state.sliced import lies_in_slices, slice_in
from fzero.table.layout import Key, Slot
from fzero.table.needs import need_optimizer
from fzero.table.optimizer import GradientTransformation, Number, Paused, members_of

Extra = Mapping[str, object]  # the keywords of an update
AHEAD = 1  # groups that are on their way to their owners while one is computed with


class WholeState(NamedTuple):
    """State of `fz.whole`. An optimizer that is declared elementwise has `slices` in the place of `trees`.

    Attributes:
        trees: tensors with the shape of their leaf, sharded as moments are.
        rest: leaf path -> its other state, on every rank. A `Place` stands for a tensor of `trees`.
    """

    trees: tuple[Sharded, ...]
    rest: dict[str, object]


@dataclass(frozen=True)
class _Part:
    """What this rank has computed of the rest, path -> the leaf's next state; and where that failed."""

    rest: dict[str, object]
    errors: list[Exception]


def whole(optimizer: GradientTransformation) -> GradientTransformation:
    """Runs an optimizer on whole leaves, one leaf at a time, also where leaves are sharded.

    For optimizers that need more than elements: norms of rows, factors, preconditioners, learned optimizers. One of
    your own runs like this by itself, unless you declare it elementwise (`fz.GradientTransformation`). Under ZeRO each
    leaf is sent to one rank, updated there, and sent back in slices, while other leaves are on their way. State with
    the shape of the leaf is sharded as moments are; the rest of it is on every rank.

    Args:
        optimizer: gets `{path: leaf}` dicts of one leaf, in float32, or in float64 where the params are. A leaf's
            update may not depend on other leaves; it may take the norm of all gradients, as a keyword `grad_norm`.
            `update` keeps the structure, shapes and dtypes of the state that `init` made.

    Raises:
        ValueError: the optimizer is made of one that clips by the norm of all leaves. Clip before it:
            `fz.chain(fz.clip_by_global_norm(1.0), fz.whole(optimizer))`.

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
    return on_whole_leaves(optimizer)


def on_whole_leaves(optimizer: GradientTransformation) -> GradientTransformation:
    if any(member.needs == "norm" for member in members_of(optimizer)):
        raise ValueError(
            "whole: got an optimizer that needs the norm of all leaves, expected one that treats each by itself. "
            "Clip before: fz.chain(fz.clip_by_global_norm(1.0), fz.whole(...))."
        )
    own = Whole(optimizer)
    needs = "norm" if is_others(optimizer.update) and own.taken({"grad_norm": 0}) else ""
    return transformation_of(own, metrics=own.metrics if optimizer.metrics else None, needs=needs, exchanges=2)


@dataclass(frozen=True)
class Whole:
    optimizer: GradientTransformation
    who: ClassVar[str] = "whole"
    state: ClassVar[Callable[..., Any]] = WholeState

    def label(self, path: str) -> str:
        return f"whole {self.optimizer.label(path) if self.optimizer.label else 'optimizer'}"

    def metrics(self, old: Any) -> dict[str, Number]:
        assert self.optimizer.metrics is not None
        return self.optimizer.metrics(next(iter(old.rest.values()))) if old.rest else {}

    @functools.cached_property
    def _keywords(self) -> frozenset[str] | None:
        return keywords_of(self.optimizer.update)

    def taken(self, extra: Extra) -> Extra:
        """Those keywords that the update takes."""
        known = self._keywords
        return extra if known is None else {name: value for name, value in extra.items() if name in known}

    # ---- a leaf's state, apart and together

    def init(self, params: object) -> Any:
        if not isinstance(params, Sharded):
            need_whole_leaves(self.label("*"))
            names, leaves, _ = pytree.named_leaves(params)
            return self.state((), {n: self.optimizer.init({n: x}) for n, x in zip(names, leaves, strict=True)})
        params = values(params)
        rest, trees = dict[str, object](), list[dict[Key, torch.Tensor]]()
        for key in params.groups:
            leaves, slots = self._leaves(params, key), params.layout.groups[key].slots
            parts: list[Leaves] = []
            for slot in slots:
                leaf = leaves[slot.leaf].clone()  # of which it may keep a part
                with seeded(Seeds(0, slot.leaf).next()), self._of("init", slot, leaf.is_meta):  # alike everywhere
                    entries, spec = flat(self.optimizer.init({slot.path: leaf}))
                need_kept(self.who, slot.path, entries)
                for place, entry in enumerate(self._in_slices(slot, entries, leaf)):
                    parts += [{} for _ in range(place + 1 - len(parts))]
                    x = entries[entry]
                    assert isinstance(x, torch.Tensor)
                    if math_dtype(x.dtype, leaf.dtype) != leaf.dtype:
                        raise ValueError(
                            f"{self.who}: the state of leaf {slot.path!r} begins with {named(x)}, expected at most "
                            f"{leaf.dtype}, which is what slices of this leaf are computed in. Make it so "
                            "(torch.zeros_like(p)), or give params in torch.float64."
                        )
                    parts[place][slot.leaf], entries[entry] = x.to(leaf.dtype), Place(place, x.dtype)
                rest[slot.path] = pytree.unflatten(spec, entries)
            trees += [{} for _ in range(len(parts) - len(trees))]
            for found, own in zip(trees, parts, strict=False):
                own = {leaf: own.get(leaf, torch.zeros_like(x)) for leaf, x in leaves.items()}
                found[key] = self._slice(params, key, own)
        for found in trees:  # all have all groups, whatever leaves are in one, so that a state goes into other units
            for key in params.groups:
                row = params.layout.groups[key].row
                if isinstance(row.policy.moment, str):
                    raise ValueError(
                        f"params[{row.path!r}]: its policy stores moments as {row.policy.moment!r}, which its "
                        f"optimizer ({row.optimizer}) cannot carry: nothing says which of its tensors may be negative. "
                        "fz.adamw, adam, lion, sgd and muon can, alone or in fz.chain and fz.partition. With others, "
                        "store moments in a dtype: fz.Policy.compact16(moment=torch.float32)."
                    )
                found[key] = found.get(key, torch.zeros_like(params.local(key))).to(row.policy.moment)
        said = "\n".join(f"{path}: {list(map(said_of, flat(state)[0]))}" for path, state in rest.items())
        params.axis.check_same(said, "fz.whole: the states of leaves", "Make the same of a leaf on every rank.")
        return self.state(tuple([params.with_buffers(found) for found in trees]), rest)

    def _leaves(self, params: Sharded, key: Key) -> Leaves:
        """The leaves of a group as the optimizer is given them."""
        return everywhere(params, key)

    def _slice(self, params: Sharded, key: Key, leaves: Leaves) -> torch.Tensor:
        """This rank's slice of a buffer of such leaves."""
        return slice_in(params, key, leaves, params.local(key).dtype)

    def _in_slices(self, slot: Slot, entries: Sequence[object], leaf: torch.Tensor) -> list[int]:
        """Which entries of a leaf's state are kept in slices: those of its shape, where it is a matrix or large."""
        return like_leaf(entries, leaf) if lies_in_slices(leaf.shape) else []

    def _of(self, what: str, slot: Slot, on_meta: bool = False) -> contextlib.AbstractContextManager[None]:
        return of_leaf(what, slot.path, f"fz.{self.who}", on_meta)

    def _of_leaf(
        self,
        slot: Slot,
        rest: object,
        g: torch.Tensor,
        p: torch.Tensor,
        own: Sequence[torch.Tensor],
        draw: Draw | None,
        extra: Extra,
    ) -> tuple[torch.Tensor, object, list[torch.Tensor]]:
        """The update of a leaf, and its next state: what every rank has, and what the trees have.

        Args:
            own: what the trees have, in the order of their numbers.
        """
        path, (had, spec) = slot.path, flat(rest)
        places = {i: x.dtype for i, x in enumerate(had) if isinstance(x, Place)}
        state = copied(had)  # which it may write to, or keep
        for (i, dtype), x in zip(places.items(), own, strict=False):
            state[i] = x.to(dtype, copy=True)
        g, p = g.clone(), p.clone()
        before = private.version(p)
        run, draw = self.optimizer.update, draw or Draw(0, 0)
        # so that whoever updates this leaf draws the same
        with seeded(Seeds(draw.seed, draw.count, slot.leaf).next()), self._of("update", slot):
            found = run({path: g}, pytree.unflatten(spec, state), {path: p}, **self.taken(extra))
        if private.version(p) != before:
            raise ValueError(
                f"{self.who}: the update of leaf {path!r} writes to its param in place. That is a copy, so the write "
                "is lost. Return what is to be added to it as its update."
            )
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], Mapping) or path not in found[0]:
            raise ValueError(
                f"{self.who}: the update of leaf {path!r} is {named(found)}, expected a pair ({{{path!r}: a tensor "
                "like the leaf}, the next state)."
            )
        updates, new = found
        update = updates[path]
        if not isinstance(update, torch.Tensor) or update.shape != p.shape or update.is_complex():
            raise ValueError(
                f"{self.who}: the update of leaf {path!r} is {named(update)}, expected a tensor like the leaf, of "
                f"shape {tuple(p.shape)} and real numbers."
            )
        before = [y if isinstance(y, torch.Tensor) else x for x, y in zip(had, state, strict=True)]
        entries, now = flat(new)
        if not is_alike(before, spec, entries, now):
            raise ValueError(
                f"{self.who}: the state of leaf {path!r} is another one after an update: "
                f"{changed(pytree.unflatten(spec, before), new)}. A state keeps the structure, the shapes and the "
                "dtypes of what its init returned. Start with zeros for what comes later."
            )
        moved = [x for i in places if isinstance(x := entries[i], torch.Tensor)]
        for i in places:
            entries[i] = had[i]
        return update, pytree.unflatten(spec, entries), [*moved, *own[len(places) :]]

    # ---- all leaves

    def update(self, grads: object, old: Any, params: object, **extra: object) -> tuple[object, Any]:
        if not isinstance(grads, Sharded) or not isinstance(params, Sharded):
            need_whole_leaves(self.label("*"))
            names, _, spec = pytree.named_leaves(grads)
            own = zip(names, *map(pytree.leaves, copied((grads, params))), strict=True)  # which it may write to
            run, found = self.optimizer.update, dict[str, tuple[Any, object]]()
            for n, g, p in own:
                with of_leaf("update", n, f"fz.{self.who}"):
                    found[n] = run({n: g}, copied(old.rest[n]), {n: p}, **self.taken(extra))
            updates = pytree.unflatten(spec, [found[name][0][name] for name in names])
            return updates, self.state((), counted(old, {name: found[name][1] for name in names}))
        if not is_transformed():
            return self._updated(grads, old, params, extra)
        rest = {path: old.rest[path] for path in grads}

        def one(slot: Slot, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            g, p, *state = leaves
            update, rest[slot.path], new = self._of_leaf(slot, rest[slot.path], g, p, state, params.draw, extra)
            return [update, *new]

        updates, *trees = on_every_rank((grads, params, *old[0]), one)  # as a transform may go on through it
        return updates, self.state(tuple(trees), counted(old, rest))

    def _updated(self, grads: Sharded, old: Any, params: Sharded, extra: Extra) -> tuple[Sharded, Any]:
        own = WholeState(tuple([tree.map(torch.clone) for tree in old.trees]), old.rest)  # as they are written
        keys = list(params.groups)
        made = run_all([self._moved(params, grads, own, key, extra) for key in keys], AHEAD)
        updates = grads.with_buffers({key: update for key, (update, _) in zip(keys, made, strict=True)}, 1.0)
        return updates, self.combine(params, own, [[part for _, part in made]])

    def paused(self, params: Sharded, grads: Sharded, old: WholeState, **extra: object) -> Paused:
        return together([self._group(params, grads, old, key, extra) for key in params.groups], AHEAD)

    def combine(self, params: Sharded, old: WholeState, parts: Sequence[list[_Part]]) -> WholeState:
        return WholeState(old.trees, self._told(params, old, [part for each in parts for part in each]))

    # ---- one group

    def _group(self, params: Sharded, grads: Sharded, old: WholeState, key: Key, extra: Extra) -> Steps[_Part]:
        """Updates one group."""
        run = self._moved(params, grads, old, key, extra)
        del grads  # or those of every group that waits would be kept
        update, part = yield from run
        update += params.local(key)
        write_values(params, key, update, params.draw or Draw(0, 0))
        return part

    def _moved(
        self, params: Sharded, grads: Sharded, old: WholeState, key: Key, extra: Extra
    ) -> Steps[tuple[torch.Tensor, _Part]]:
        """This rank's slice of the updates of a group, whose trees are written, over an exchange in and one out."""
        own, dtype = [tree for tree in old.trees if key in tree.groups], math_dtype(params.format(key).dtype)
        slices = [values(tree.only([key])).local(key).to(dtype) for tree in (grads, params, *own)]
        coming, like = start_whole(params, key, slices, "whole leaves"), slices[0].new_empty(0)
        del grads, slices
        whole = yield coming
        del coming
        made, part = self._computed(params, key, whole, old.rest, extra)
        del whole
        pieces = yield start_slices(params, key, made, like, "updates of leaves")
        update, *new = [joined(params, key, each) for each in pieces]
        for tree, x in zip(own, new, strict=True):
            write_values(tree, key, x, params.draw or Draw(0, 0))
        return update, part

    def _computed(
        self, params: Sharded, key: Key, whole: Sequence[Leaves], rest: Mapping[str, object], extra: Extra
    ) -> tuple[list[Leaves], _Part]:
        """The updates of this rank's own leaves of a group, and what the trees and the rest have of them."""
        made: list[Leaves] = [{} for _ in whole[1:]]
        own, errors = dict[str, object](), list[Exception]()
        for slot in owned(params, key):
            g, p, *state = [each[slot.leaf] for each in whole]
            try:
                update, own[slot.path], new = self._of_leaf(slot, rest[slot.path], g, p, state, params.draw, extra)
            except Exception as error:  # the others wait for what would have come of it
                errors.append(error)
                update, new = torch.zeros_like(p), state
            for leaves, x in zip(made, (update, *new), strict=True):
                leaves[slot.leaf] = x.to(p.dtype)
        return made, _Part(own, errors)

    def _told(self, params: Sharded, old: WholeState, parts: Sequence[_Part]) -> dict[str, object]:
        """The rest of all leaves' states, each from its owner; what failed on one rank is raised on all."""
        axis, rest = params.axis, {path: old.rest[path] for path in params}
        for part in parts:
            rest |= part.rest
        cut = [key for key in params.groups if params.axis_of(key).size > 1]
        slots = [(owners(params.layout, key)[s.leaf], s) for key in cut for s in params.layout.groups[key].slots]
        mine = [slot for rank, slot in slots if rank == axis.rank or axis.fake]  # which stands for all
        own = {slot.path: numbers_of(rest[slot.path]) for slot in mine}
        numbers = _all_well(axis, parts, own)
        tensors = exchanged(axis, [(rank, tensors_of(rest[slot.path])) for rank, slot in slots])
        for (rank, slot), x in zip(slots, tensors, strict=True):
            if rank != axis.rank:
                rest[slot.path] = with_others(rest[slot.path], x, numbers[rank][slot.path])
        return counted(old, rest)


def counted(old: Any, rest: Mapping[str, object]) -> dict[str, object]:
    """The states of all leaves after an update of some: the others are frozen, and count the run's updates on."""
    is_count = lambda x: isinstance(x, pytree.Count)
    own = lambda state: pytree.map(lambda x: x.next() if is_count(x) else x, state, is_leaf=is_count)
    return {path: rest[path] if path in rest else own(state) for path, state in old.rest.items()}


Numbers = dict[str, list[float]]  # path -> those of a leaf's state


def _all_well(axis: Axis, parts: Sequence[_Part], numbers: Numbers) -> list[Numbers]:
    """Every rank's numbers, or an error on every rank: nothing else is exchanged then."""
    errors, over, doing = [error for part in parts for error in part.errors], axis.tensor, "the update by fz.whole"
    failed = f"{type(errors[0]).__name__}: {errors[0]}" if errors else ""
    beside = over.exchange(failed, doing) if over is not None and over.size > 1 else []  # who have the same leaves
    said = json.dumps((next(filter(None, (failed, *beside)), ""), numbers))
    heard = [json.loads(text) for text in (axis.exchange(said, doing) if axis.size > 1 else [said])]
    failed = next(filter(None, (text for text, _ in heard)), "")
    try:
        if errors:
            raise errors[0]
        if failed:
            raise RuntimeError(f"step.update: another rank's part of an update by fz.whole failed: {failed}")
    finally:
        for own in (errors, *[part.errors for part in parts]):
            own.clear()  # or they and the frames that they went through would hold each other
    return [own for _, own in heard]
