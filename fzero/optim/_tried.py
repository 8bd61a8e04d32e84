"""A small trial of users' own optimizers: whether a buffer's update is that of its leaves, and a slice's that of it."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch.utils import _python_dispatch as dispatch

from fzero.base import private, pytree
from fzero.base.random import Seeds, seeded
from fzero.base.rebound import is_others, reached, rebound, sends, tensors_held
from fzero.base.restored import as_it_was, cannot_be_put_back
from fzero.comm.axis import Axis
from fzero.formats.formats import ALIGN
from fzero.kernels.onepass import math_dtype
from fzero.optim._join import members_of
from fzero.optim._whole import inside
from fzero.optim.base import taken, values
from fzero.state.moments import copied
from fzero.state.sharded import Sharded, map_trees
from fzero.table.layout import Key, Layout, Slot
from fzero.table.optimizer import GradientTransformation
from fzero.table.rows import Row

_SIZES = (1.0, 30.0, 0.1)  # of the grads, one update after the other
_WIDE = 160  # elements of a dim that no optimizer takes for few
_MOST = 1 << 15  # elements of a leaf
_CLOSE = {torch.float64: 1e-8, torch.float32: 1e-3}  # of the largest update of a leaf
P = ParamSpec("P")
T = TypeVar("T")
Made = list[dict[str, torch.Tensor]]  # path -> a leaf's update, or what this rank has of it, by update


def need_elements(who: str, optimizer: GradientTransformation, params: Sharded) -> None:
    """Refuses an optimizer of the user's own that is not by elements where it meets buffers, or slices of them.

    What the trial changes in what the optimizer comes to is put back; where nothing can do so, it is not tried, with a
    warning. Nor is one tried that needs other leaves, hides tensors of a transform of torch.func, or sends something to
    other ranks by torch.distributed. A sum over all elements is right where no rank has slices.

    Raises:
        ValueError: it makes other updates of them than of leaves alone, on every rank.
    """
    members = [(inside(member) or member, inside(member) is not None) for member in members_of(optimizer)]
    members = [(member, whole) for member, whole in members if is_others(member.update)]
    buffers = [params.entries.get(key, params.held_entries.get(key)) for key in params.groups]
    if not members or any(map(private.is_fake, buffers)):
        return
    trial = _Trial.of(params)
    for member, whole in members if trial is not None else ():
        assert trial is not None
        with private.below_transforms():
            found = trial.tried(who, member, whole)
        for axis in (params.axis, params.axis.tensor):  # a rank whose slices are right raises too
            if axis is not None and axis.ranks > 1:
                found = next(filter(None, axis.exchange(found, "a trial of the optimizer")), "")
        if found and whole:
            raise ValueError(
                f"{who}: got an optimizer of your own{_named(member, trial)} in fz.whole that {found}. Its update is "
                "called once for each leaf, on one rank: keep what it counts in its state, and return what is to be "
                "added to the param."
            )
        if found:
            raise ValueError(
                f"{who}: got an optimizer of your own{_named(member, trial)} that {found}. An update is given flat "
                "buffers, each with this rank's slices of several leaves, and must treat every element by itself. Use "
                "fz.whole(optimizer), which gives it each leaf alone and in its shape, and for the norm of all leaves "
                "fz.chain(fz.clip_by_global_norm(limit), optimizer)."
            )


def _named(member: GradientTransformation, trial: _Trial) -> str:
    return f" ({member.label(trial.rows[0].path)})" if member.label else ""


def _kinds(slots: Sequence[Slot]) -> list[Slot]:
    """One or two leaves of each number of dims, the most dims first: the widest and the smallest."""
    out = list[Slot]()
    for ndim in sorted({len(slot.shape) for slot in slots}, reverse=True):
        own = [slot for slot in slots if len(slot.shape) == ndim]
        widest = max(own, key=lambda slot: (min((*slot.shape, _WIDE)), slot.numel))
        smallest = min(own, key=lambda slot: slot.numel)
        out += [widest, smallest] if smallest.shape != widest.shape else [widest]
    others = [slot for slot in slots if slot not in out]
    return out if len(out) > 1 else out + others[:1]


def _shape(like: Sequence[int], least: int) -> tuple[int, ...]:
    """That of a small leaf in the place of another one: as wide as this, up to what is wide for an optimizer."""
    shape = [max(1, min(size, _WIDE)) for size in like]
    if shape and least:
        shape[0] = max(shape[0], least)
    while math.prod(shape) > _MOST and max(shape[1:], default=1) > 1:
        widest = max(range(1, len(shape)), key=shape.__getitem__)
        shape[widest] = -(-shape[widest] // 2)
    return tuple(shape)


def _plain(member: GradientTransformation) -> GradientTransformation | None:
    """The same with plain tensors in the place of those of torch.func's transforms; None where it hides some."""
    own = member.init, member.update
    held = {id(x) for x in tensors_held(own)}
    if any(isinstance(x, torch.Tensor) and private.is_wrapper(x) and id(x) not in held for x in reached(own)):
        return None
    init, update = rebound(own, _constant)
    return member._replace(init=init, update=update)


def _constant(x: torch.Tensor) -> torch.Tensor:
    """A tensor's value; of one that is mapped over as many elements as it has there."""
    if not private.is_wrapper(x):
        return x
    return private.unwrapped(x).detach().reshape(-1)[: x.numel()].reshape(x.shape)


class _Still(dispatch.TorchDispatchMode):
    """Draws of random numbers are all one half inside, as those of a buffer are not those of its leaves."""

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            for x in pytree.flatten(out)[0]:
                if isinstance(x, torch.Tensor):
                    x.fill_(0.5 if x.is_floating_point() else 0)
        return out


def _stilled(member: GradientTransformation) -> GradientTransformation:
    """The same where it draws nothing."""
    return member._replace(init=_in_still(member.init), update=_in_still(member.update))


def _in_still(fn: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with _Still():
            return fn(*args, **kwargs)

    return run


@dataclasses.dataclass(frozen=True)
class _Trial:
    """One group of small leaves, of the kinds that a state has, and cut as those are.

    Attributes:
        rows: of the small leaves.
        axis: over which their buffer is cut.
        like: what trees are made of.
        alone: whether each leaf of the state has a buffer without a gap for itself.
    """

    rows: tuple[Row, ...]
    axis: Axis
    like: Sharded
    alone: bool

    @staticmethod
    def of(params: Sharded) -> _Trial | None:
        groups = [params.layout.groups[key] for key in params.layout.trainable]
        if not groups:
            return None
        group = max(groups, key=lambda each: len(each.row.cuts))
        axis = params.axis_of(group.key)
        whole = axis.size == 1 and not any(row.slices for row in params.layout.rows)
        alone = whole and all(len(own.slots) == 1 and own.slots[0].numel % ALIGN == 0 for own in groups)
        rows = list[Row]()
        for slot in _kinds([slot for own in groups for slot in own.slots]):
            own = params.layout.rows[slot.leaf]
            shape = _shape(own.shape, ALIGN if alone else 0 if rows else axis.size * ALIGN + 5)
            slices = own.slices._replace(parts=(shape[own.slices.dim],)) if own.slices else None
            rows.append(
                dataclasses.replace(
                    group.row, path=own.path, shape=shape, unit=group.unit, slices=slices, styles=own.styles, hint=None
                )
            )
        return _Trial(tuple(rows), axis, params, alone)

    @property
    def dtype(self) -> torch.dtype:
        return math_dtype(self.rows[0].policy.param_format.dtype)

    @property
    def cut(self) -> bool:
        """Whether ranks have slices."""
        return self.axis.size > 1 or any(row.slices for row in self.rows)

    def tried(self, who: str, member: GradientTransformation, whole: bool) -> str:
        """What it does otherwise, in words; nothing where it does nothing so, or cannot be tried.

        Args:
            whole: whether it is given whole leaves, each by itself.
        """
        try:
            found, why = self._found(member, whole)
        except Exception:  # whatever it needs that a trial has not: its first update will say
            return ""
        if why:
            warnings.warn(
                f"{who}: an optimizer of your own{_named(member, self)} could not be tried on small leaves: {why}. "
                "It must treat every element of the buffers that it is given by itself, in any slices; what treats "
                "leaves wants fz.whole(optimizer).",
                stacklevel=4,
            )
        return found

    def _found(self, member: GradientTransformation, whole: bool) -> tuple[str, str]:
        """What it does otherwise, and why it cannot be tried, in words."""
        plain = _plain(member)
        own = reached((plain.init, plain.update)) if plain is not None else []
        if plain is None or sends(own):
            return "", ""
        if why := cannot_be_put_back(own):
            return "", why
        if whole:
            return self._fault_of_leaves(plain, own), ""
        found = self._fault(plain, own)
        return (self._fault(_stilled(plain), own) if found else ""), ""  # by what it draws, perhaps

    def _fault(self, member: GradientTransformation, own: Sequence[object]) -> str:
        uncut = self.like.axis.uncut
        alone = [dataclasses.replace(row, cuts=(), slices=None) for row in self.rows]
        apart = [dataclasses.replace(row, unit=f"{row.unit}.{place}") for place, row in enumerate(alone)]
        with torch.no_grad():
            together = self._updates(member, own, Layout.build(apart if self.alone else alone, 1), uncut)
            try:
                of_leaves = self._updates(member, own, Layout.build(apart, 1), uncut, in_shape=True)
            except Exception:  # what takes buffers only, as fz.global_norm does
                of_leaves = self._updates(member, own, Layout.build(apart, 1), uncut)
            if path := self._differs(together, of_leaves):
                where = "in a buffer that it shares, or flat, than of it alone and in its shape"
                return f"makes other updates of a leaf such as {path!r} {where}"
            if self.cut:
                layout = Layout.build(self.rows, self.axis.size, self.like.layout.tensor)
                cut = self._updates(member, own, layout, self.like.axis)
                if path := self._differs(together, cut, layout):
                    return (
                        f"makes other updates of a leaf such as {path!r} in slices, as ranks have it, than of it whole"
                    )
        return ""

    def _fault_of_leaves(self, member: GradientTransformation, own: Sequence[object]) -> str:
        with torch.no_grad(), as_it_was(own):
            return next(filter(None, [self._fault_of_leaf(member, row) for row in self.rows]), "")

    def _fault_of_leaf(self, member: GradientTransformation, row: Row) -> str:
        made = torch.Generator(device="cpu").manual_seed(0)
        p, g = torch.randn(2, *row.shape, generator=made, dtype=self.dtype, device="cpu").to(self.like.device).unbind()
        found = list[torch.Tensor]()
        for _ in range(2):
            own = p.clone()
            with seeded(Seeds(0).next()):
                state = member.init({row.path: p.clone()})
                updates, _ = member.update({row.path: g.clone()}, state, {row.path: own})
            found.append(updates[row.path])
            if not torch.equal(own, p):
                return f"writes in place to a param such as {row.path!r}, of which it is given a copy"
        if torch.allclose(*found, rtol=_CLOSE[self.dtype], atol=0.0, equal_nan=True):
            return ""
        return f"makes another update of a leaf such as {row.path!r} where it is called once more with the same"

    def _differs(self, whole: Made, other: Made, layout: Layout | None = None) -> str:
        """The path of a leaf that two trials have other updates of; with a layout, this rank's slice of it."""
        for ours, theirs in zip(whole, other, strict=True):
            for path, x in ours.items():
                scale, y = x.abs().max(), theirs[path]
                if layout is not None:
                    (key, slot), rank = layout.key_of[path], self.axis.rank
                    x = self._sliced(layout, slot.leaf, x.view(self.rows[slot.leaf].shape)).reshape(-1)
                    start = min(max(rank * layout.shard_numel(key) - slot.offset, 0), slot.numel)
                    x = x[start : start + y.numel()]
                if not torch.allclose(x, y, rtol=0.0, atol=float(scale) * _CLOSE[self.dtype], equal_nan=True):
                    return path
        return ""

    def _sliced(self, layout: Layout, leaf: int, x: torch.Tensor) -> torch.Tensor:
        """What this rank has of a leaf over the tensor axis."""
        slices, (rank, ranks) = layout.rows[leaf].slices, layout.tensor
        if slices is None:
            return x
        return torch.cat([x.narrow(slices.dim, *own) for own in slices.ranges(ranks)[rank]], slices.dim)

    def _updates(
        self, member: GradientTransformation, own: Sequence[object], layout: Layout, axis: Axis, in_shape: bool = False
    ) -> Made:
        with seeded(Seeds(0).next()), as_it_was(own):
            return self._made(member, layout, axis, in_shape)

    def _made(self, member: GradientTransformation, layout: Layout, axis: Axis, in_shape: bool) -> Made:
        made = torch.Generator(device="cpu").manual_seed(0)
        shapes = [(len(_SIZES) + 1, *row.shape) for row in self.rows]
        drawn = [torch.randn(shape, generator=made, dtype=self.dtype, device="cpu") for shape in shapes]
        drawn = [x.to(self.like.device) * 30.0**place for place, x in enumerate(drawn)]
        norms = [torch.stack([x[i].double().norm() for x in drawn]).norm() for i in range(len(_SIZES) + 1)]
        empty = Sharded(layout, axis, self.like.structure, {})

        def tree(number: int, size: float) -> Sharded:
            leaves = {place: x[number] * size for place, x in enumerate(drawn)}
            if in_shape:
                return empty.with_buffers({key: leaves[group.slots[0].leaf] for key, group in layout.groups.items()})
            own = {leaf: self._sliced(layout, leaf, x) for leaf, x in leaves.items()}
            return empty.with_buffers({key: self._slice(layout, key, own, empty.rank_of(key)) for key in layout.groups})

        params = tree(0, 1.0)
        state, out = member.init(copied(params)), Made()
        for number, size in enumerate(_SIZES, 1):
            extra = taken(member.update, {"grad_norm": norms[number] * size})
            given = map_trees(values, copied(state))
            updates, state = member.update(tree(number, size), given, copied(params), **extra)
            updates = values(updates)
            params = params.map(torch.add, updates)
            out.append(self._leaves(params, updates, in_shape))
        return out

    def _slice(self, layout: Layout, key: Key, leaves: Mapping[int, torch.Tensor], rank: int) -> torch.Tensor:
        size = layout.shard_numel(key)
        return layout.pack(key, leaves, self.dtype).narrow(0, rank * size, size).clone()

    def _leaves(self, params: Sharded, updates: Sharded, in_shape: bool) -> dict[str, torch.Tensor]:
        """Path -> the update of each leaf, flat."""
        out = dict[str, torch.Tensor]()
        for key, group in params.layout.groups.items():
            u, p = updates.local(key), params.local(key)
            pieces: Sequence[torch.Tensor]
            pieces = [torch.broadcast_to(u, p.shape)] if in_shape else params.layout.cut(key, params.rank_of(key), u)
            out |= {slot.path: x.detach().reshape(-1) for slot, x in zip(group.slots, pieces, strict=True)}
        return out
