"""A small trial of users' own optimizers: whether a buffer's update is that of its leaves, and a slice's that of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

from fzero.base import private
from fzero.base.random import Seeds, seeded
from fzero.base.rebound import draws, is_others, rebound, sends, tensors_hidden
from fzero.comm.axis import Axis
from fzero.formats.formats import ALIGN
from fzero.kernels.onepass import math_dtype
from fzero.optim._join import members_of
from fzero.optim.base import taken, values
from fzero.state.moments import copied
from fzero.state.sharded import Sharded, map_trees
from fzero.table.layout import Key, Layout
from fzero.table.optimizer import GradientTransformation
from fzero.table.rows import Row

_SIZES = (1.0, 30.0, 0.1)  # of the grads, one update after the other
_WIDE = 160  # elements of a dim that no optimizer takes for few
_MOST = 1 << 16  # elements of a leaf
_CLOSE = {torch.float64: 1e-8, torch.float32: 1e-3}  # of the largest update of a leaf
Made = list[dict[str, torch.Tensor]]  # path -> a leaf's update, or what this rank has of it, by update


def need_elements(who: str, optimizer: GradientTransformation, params: Sharded) -> None:
    """Refuses an optimizer of the user's own that is not by elements where it meets buffers, or slices of them.

    One that could not be tried is not refused: as it needs other leaves than those of a trial, draws random numbers,
    sends something to other ranks by torch.distributed, or comes to tensors of a transform of torch.func that it does
    not hold. A sum over all elements is right where no rank has slices.

    Raises:
        ValueError: it makes other updates of them than of leaves alone, on every rank.
    """
    members = [member for member in members_of(optimizer) if is_others(member.update)]
    buffers = [params.entries.get(key, params.held_entries.get(key)) for key in params.groups]
    if not members or any(map(private.is_fake, buffers)):
        return
    trial = _Trial.of(params)
    for member in members if trial is not None else ():
        assert trial is not None
        own = member.init, member.update
        with private.below_transforms():
            plain = None if draws(own) or sends(own) else _plain(member)
            found = trial.fault(plain) if plain is not None else ""
        if trial.axis.size > 1:
            found = next(filter(None, trial.axis.exchange(found, "a trial of the optimizer")), "")
        if found:
            said = f" ({member.label(trial.rows[0].path)})" if member.label else ""
            raise ValueError(
                f"{who}: got an optimizer of your own{said} that {found}. An update is given flat buffers, each with "
                "this rank's slices of several leaves, and must treat every element by itself. Use "
                "fz.whole(optimizer), which gives it each leaf alone and in its shape, and for the norm of all leaves "
                "fz.chain(fz.clip_by_global_norm(limit), optimizer)."
            )


def _shape(like: Sequence[int], length: int) -> tuple[int, ...]:
    """That of a small leaf in the place of another one: as wide as this, up to what is wide for an optimizer."""
    if not like:
        return ()
    shape = [max(length, min(like[0], _WIDE)), *[max(1, min(size, _WIDE)) for size in like[1:]]]
    while math.prod(shape) > _MOST and max(shape[1:], default=2) > 2:
        widest = max(range(1, len(shape)), key=shape.__getitem__)
        shape[widest] = -(-shape[widest] // 2)
    return tuple(shape)


def _plain(member: GradientTransformation) -> GradientTransformation | None:
    """The same with plain tensors in the place of those of torch.func's transforms; None where it hides some."""
    own = member.init, member.update
    if any(map(private.is_wrapper, tensors_hidden(own))):
        return None
    init, update = rebound(own, _constant)
    return member._replace(init=init, update=update)


def _constant(x: torch.Tensor) -> torch.Tensor:
    """A tensor's value; of one that is mapped over as many elements as it has there."""
    if not private.is_wrapper(x):
        return x
    return private.unwrapped(x).detach().reshape(-1)[: x.numel()].reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class _Trial:
    """One group with at most two small leaves, of as many dims as leaves of a state's, and cut as these are.

    Attributes:
        rows: of the small leaves.
        axis: over which their buffer is cut.
        like: what trees are made of.
    """

    rows: tuple[Row, ...]
    axis: Axis
    like: Sharded

    @staticmethod
    def of(params: Sharded) -> _Trial | None:
        groups = [params.layout.groups[key] for key in params.layout.trainable]
        if not groups:
            return None
        size = lambda slot: (len(slot.shape), min((*slot.shape, _WIDE)), slot.numel)
        group = max(groups, key=lambda each: (len(each.slots) > 1, max(map(size, each.slots))))
        first = max(group.slots, key=size)
        chosen = [first, *[slot for slot in group.slots if slot is not first][:1]]
        alone = len(chosen) == 1 and first.numel % ALIGN == 0  # and no gap behind it
        axis, rows = params.axis_of(group.key), list[Row]()
        for slot in chosen:
            length = (1 if rows else axis.size) * ALIGN + (0 if alone else 5)
            shape = _shape(slot.shape, length)
            of_leaf = params.layout.rows[slot.leaf]
            rows.append(
                dataclasses.replace(group.row, path=of_leaf.path, shape=shape, unit=group.unit, slices=None, hint=None)
            )
        return _Trial(tuple(rows), axis, params)

    @property
    def dtype(self) -> torch.dtype:
        return math_dtype(self.rows[0].policy.param_format.dtype)

    def fault(self, member: GradientTransformation) -> str:
        """What it does otherwise, in words; nothing where it does nothing so, or cannot be tried."""
        alone = [dataclasses.replace(row, cuts=()) for row in self.rows]
        apart = [dataclasses.replace(row, unit=f"{row.unit}.{place}") for place, row in enumerate(alone)]
        uncut = self.like.axis.uncut
        with torch.no_grad():
            together = self._made(member, Layout.build(alone, 1), uncut)
            if together is None:
                return ""
            rows = self.rows if self.axis.size > 1 else ()
            of_leaves = self._made(member, Layout.build(apart, 1), uncut, in_shape=True)
            cut = self._made(member, Layout.build(rows, self.axis.size), self.axis) if rows else None
            for other, where in (
                (of_leaves, "in a buffer that it shares, or flat, than of it alone and in its shape"),
                (cut, "in slices, as ranks have it, than of it whole"),
            ):
                path = self._differs(together, other, sliced=other is cut) if other is not None else ""
                if path and not self._is_random(member, together, Layout.build(alone, 1)):
                    return f"makes other updates of a leaf such as {path!r} {where}"
        return ""

    def _is_random(self, member: GradientTransformation, first: Made, layout: Layout) -> bool:
        again = self._made(member, layout, self.like.axis.uncut, seed=1)
        return again is None or bool(self._differs(first, again))

    def _differs(self, whole: Made, other: Made, sliced: bool = False) -> str:
        """The path of a leaf that two trials have other updates of."""
        layout = Layout.build(self.rows, self.axis.size) if sliced else None
        for ours, theirs in zip(whole, other, strict=True):
            for path, x in ours.items():
                scale, y = x.abs().max(), theirs[path]
                if layout is not None:
                    (key, slot), rank = layout.key_of[path], self.axis.rank
                    start = min(max(rank * layout.shard_numel(key) - slot.offset, 0), slot.numel)
                    x = x[start : start + y.numel()]
                if not torch.allclose(x, y, rtol=0.0, atol=float(scale) * _CLOSE[self.dtype], equal_nan=True):
                    return path
        return ""

    def _made(
        self,
        member: GradientTransformation,
        layout: Layout,
        axis: Axis,
        in_shape: bool = False,
        seed: int = 0,
    ) -> Made | None:
        """The updates of leaves in a layout; None where it cannot be tried."""
        try:
            with seeded(Seeds(seed).next()):
                return self._updates(member, layout, axis, in_shape)
        except Exception:  # whatever it needs that a trial has not, its first update will say
            return None

    def _updates(self, member: GradientTransformation, layout: Layout, axis: Axis, in_shape: bool) -> Made:
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
            return empty.with_buffers({key: self._slice(layout, key, leaves, axis.rank) for key in layout.groups})

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
            pieces = [torch.broadcast_to(u, p.shape)] if in_shape else params.layout.cut(key, params.axis.rank, u)
            out |= {slot.path: x.detach().reshape(-1) for slot, x in zip(group.slots, pieces, strict=True)}
        return out
