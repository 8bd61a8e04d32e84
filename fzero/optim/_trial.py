"""A few updates by a user's own optimizer of small leaves: in one buffer, alone in their shapes, and in slices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch.utils import _python_dispatch as dispatch

from fzero.base import private, pytree
from fzero.base.random import Seeds, seeded
from fzero.base.rebound import reached, rebound, tensors_held
from fzero.base.restored import as_it_was, cannot_be_put_back
from fzero.base.sending import sends
from fzero.comm.axis import Axis
from fzero.formats.formats import ALIGN
from fzero.kernels.onepass import math_dtype
from fzero.optim._small_leaves import not_finite, small_leaves
from fzero.optim.base import taken, values
from fzero.state.moments import copied
from fzero.state.sharded import Sharded, map_trees
from fzero.table.layout import Key, Layout, Slot
from fzero.table.optimizer import GradientTransformation
from fzero.table.rows import Row

_WIDE = 160  # elements of a dim that no optimizer takes for few
_MOST = 1 << 15  # elements of a leaf
_OBJECTS = 1 << 17  # that are looked at, of what an optimizer comes to
_CLOSE = {torch.float64: 1e-8, torch.float32: 1e-5}  # of the largest update of a leaf, by what it computes in
_NARROW = 1e-3  # the same in narrower dtypes
P = ParamSpec("P")
T = TypeVar("T")
Made = list[dict[str, torch.Tensor]]  # path -> a leaf's update, or what this rank has of it, by update
Tree = Sharded | dict[str, torch.Tensor]


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


class _Noted:
    """What a mode notes, apart from it: torch imports its compiler, for a second, where a mode has this itself.

    Attributes:
        drawn: the operators that have drawn random numbers for elements, or from torch's default generators.
        dtypes: the floating ones of tensors of more than a number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drawn, self.dtypes = list[str](), set[torch.dtype]()

    @property
    def close(self) -> float:
        return max((_CLOSE.get(dtype, _NARROW) for dtype in self.dtypes), default=_CLOSE[torch.float64])

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        found = [x for x in pytree.flatten(out)[0] if isinstance(x, torch.Tensor)]
        self.dtypes |= {x.dtype for x in found if x.ndim and x.is_floating_point()}
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            own = any(isinstance(x, torch.Generator) for x in (*args, *(kwargs or {}).values()))
            if not own or any(x.ndim for x in found):  # a number is the same on every rank, by a generator of its own
                self.drawn.append(str(func))
        return out


class _Watch(_Noted, dispatch.TorchDispatchMode):
    """Notes what an optimizer draws, and in which dtypes it computes, while functions of it run inside."""

    def around(self, fn: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(fn)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with self:
                return fn(*args, **kwargs)

        return run


def _needs_buffers(error: BaseException) -> bool:
    """Tells whether a function of this library has raised it, as an author's code called it."""
    roots = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    roots = [name.partition(".")[0] for name in roots if name != __name__]
    roots = [root for root in roots if root not in ("torch", "optree")]
    return len(set(roots)) > 1 and roots[-1] == "fzero"


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, OverflowError) else f"it raises {type(error).__name__}: {str(error)[:200]}"


@dataclasses.dataclass(frozen=True)
class Trial:
    """One group of small leaves, of the kinds that a state has, and cut as those are.

    Attributes:
        rows: of the small leaves.
        axis: over which their buffer is cut.
        like: what trees are made of: params, those alone that the optimizer is given.
        alone: whether each leaf of the state has a buffer without a gap for itself.
    """

    rows: tuple[Row, ...]
    axis: Axis
    like: Sharded
    alone: bool

    @staticmethod
    def of(params: Sharded) -> Trial | None:
        groups = [params.layout.groups[key] for key in params.groups]
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
                    group.row,
                    path=own.path,
                    shape=shape,
                    unit=group.unit,
                    slices=slices,
                    styles=own.styles,
                    hint=None,
                    optimizer=own.optimizer,
                )
            )
        return Trial(tuple(rows), axis, params, alone)

    @property
    def dtype(self) -> torch.dtype:
        return math_dtype(self.rows[0].policy.param_format.dtype)

    @property
    def cut(self) -> bool:
        """Whether ranks have slices."""
        return self.axis.size > 1 or any(row.slices for row in self.rows)

    def tried(self, member: GradientTransformation, whole: bool) -> tuple[str, str]:
        """What it does otherwise, and why it could not be tried, in words; nothing where that is so.

        Args:
            whole: whether it is given whole leaves, each by itself.
        """
        try:
            own = reached((member.init, member.update), _OBJECTS)
            plain = _plain(member)
            if plain is None:
                return (
                    "",
                    "a transform of torch.func goes on through tensors that it comes to and does not hold",
                )
            own = own if plain is member else reached((plain.init, plain.update), _OBJECTS)
            if sends(own):
                return "", "it may send something to other ranks by torch.distributed"
            if why := cannot_be_put_back(own):
                return "", why
            return (self._fault_of_leaves(plain, own), "") if whole else self._fault(plain, own)
        except Exception as error:
            return "", _said(error)

    def _fault(self, member: GradientTransformation, own: Sequence[object]) -> tuple[str, str]:
        if self.dtype == torch.float64:
            return self._fault_in(torch.float64, member, own)
        try:
            return self._fault_in(torch.float64, member, own)
        except Exception:  # it holds tensors of another dtype, perhaps
            return self._fault_in(self.dtype, member, own)

    def _fault_in(self, dtype: torch.dtype, member: GradientTransformation, own: Sequence[object]) -> tuple[str, str]:
        uncut, watch, why = self.like.axis.uncut, _Watch(), ""
        member = member._replace(init=watch.around(member.init), update=watch.around(member.update))
        alone = [dataclasses.replace(row, cuts=(), slices=None) for row in self.rows]
        apart = [dataclasses.replace(row, unit=f"{row.unit}.{place}") for place, row in enumerate(alone)]
        shapes, device = [row.shape for row in self.rows], self.like.device
        given = small_leaves(shapes, dtype, device)
        made = functools.partial(self._updates, member, own)
        with torch.no_grad():
            buffers = Layout.build(apart if self.alone else alone, 1)
            together = made(given, buffers, uncut)
            if watch.drawn:
                return f"draws random numbers ({watch.drawn[0]}), by slices and not by leaves", ""
            leaves = Layout.build(apart, 1)
            try:
                of_leaves = made(given, leaves, uncut, in_shape=True)
            except Exception as error:
                of_leaves, why = self._without_shapes(error, functools.partial(made, given, leaves, uncut))
            layout = Layout.build(self.rows, self.axis.size, self.like.layout.tensor) if self.cut else None
            found = self._unlike(together, of_leaves, functools.partial(made, given), layout, watch.close)
            if not found:
                made = functools.partial(made, [not_finite(given[0])])
                with contextlib.suppress(Exception):  # what raises there says so itself
                    pair = made(buffers, uncut), made(leaves, uncut, in_shape=True)
                    found = self._unlike(*pair, made, layout, watch.close, ", where a grad is not finite,")
        return found, "" if found else why

    def _unlike(
        self,
        together: Made,
        alone: Made,
        made: Callable[..., Made],
        layout: Layout | None,
        close: float,
        where: str = "",
    ) -> str:
        """How the updates of leaves in buffers are others than of them alone, or in slices of a layout."""
        if path := self._differs(together, alone, close):
            other = "in a buffer that it shares, or flat, than of it alone and in its shape"
        elif layout is not None and (path := self._differs(together, made(layout, self.like.axis), close, layout)):
            other = "in slices, as ranks have it, than of it whole"
        return f"makes{where} other updates of a leaf such as {path!r} {other}" if path else ""

    def _without_shapes(self, error: Exception, made: Callable[..., Made]) -> tuple[Made, str]:
        """The updates of leaves by what takes no buffers in their shapes, and why it was not tried in these.

        Functions of this library, as fz.global_norm, take buffers, or leaves in their shapes in any other tree.
        """
        if not _needs_buffers(error):
            return made(), f"of leaves in their shapes {_said(error)}"
        try:
            return made(in_shape=True, named=True), ""
        except Exception:  # it calls methods of a step's tree, too
            return made(), ""

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

    def _differs(self, whole: Made, other: Made, close: float, layout: Layout | None = None) -> str:
        """The path of a leaf that two trials have other updates of; with a layout, this rank's slice of it."""
        for ours, theirs in zip(whole, other, strict=True):
            for path, x in ours.items():
                scale, y = x.nan_to_num(0.0, 0.0, 0.0).abs().max(), theirs[path]
                if layout is not None:
                    (key, slot), rank = layout.key_of[path], self.axis.rank
                    x = self._sliced(layout, slot.leaf, x.view(self.rows[slot.leaf].shape)).reshape(-1)
                    start = min(max(rank * layout.shard_numel(key) - slot.offset, 0), slot.numel)
                    x = x[start : start + y.numel()]
                if not torch.allclose(x, y.to(x.dtype), rtol=0.0, atol=float(scale) * close, equal_nan=True):
                    return path
        return ""

    def _sliced(self, layout: Layout, leaf: int, x: torch.Tensor) -> torch.Tensor:
        """What this rank has of a leaf over the tensor axis."""
        slices, (rank, ranks) = layout.rows[leaf].slices, layout.tensor
        if slices is None:
            return x
        return torch.cat([x.narrow(slices.dim, *own) for own in slices.ranges(ranks)[rank]], slices.dim)

    def _updates(
        self,
        member: GradientTransformation,
        own: Sequence[object],
        given: Sequence[Sequence[Sequence[torch.Tensor]]],
        layout: Layout,
        axis: Axis,
        in_shape: bool = False,
        named: bool = False,
    ) -> Made:
        """The updates that it makes of the small leaves.

        Args:
            given: some times the params, and the grads of each update.
            in_shape: give it leaves in their shapes in the place of buffers, each of which has one.
            named: in a dict of their paths.
        """
        empty, out = Sharded(layout, axis, self.like.structure, {}), Made()

        def tree(leaves: Sequence[torch.Tensor]) -> Tree:
            if named:
                return {row.path: x.clone() for row, x in zip(self.rows, leaves, strict=True)}
            if in_shape:
                groups = layout.groups.items()
                return empty.with_buffers({key: leaves[group.slots[0].leaf].clone() for key, group in groups})
            own = {leaf: self._sliced(layout, leaf, x) for leaf, x in enumerate(leaves)}
            return empty.with_buffers({key: self._slice(layout, key, own, empty.rank_of(key)) for key in layout.groups})

        with seeded(Seeds(0).next()), as_it_was(own):
            for first, *grads in given:
                params = tree(first)
                state = member.init(copied(params))
                for leaves in grads:
                    norm = torch.stack([x.double().norm() for x in leaves]).norm()
                    kept = map_trees(values, copied(state))
                    extra = taken(member.update, {"grad_norm": norm})
                    updates, state = member.update(tree(leaves), kept, copied(params), **extra)
                    out.append(_by_path(params, updates))
                    params = _added(params, updates)
        return out

    def _slice(self, layout: Layout, key: Key, leaves: Mapping[int, torch.Tensor], rank: int) -> torch.Tensor:
        size = layout.shard_numel(key)
        return layout.pack(key, leaves, leaves[0].dtype).narrow(0, rank * size, size).clone()


def _added(params: Tree, updates: Tree) -> Tree:
    if not isinstance(params, Sharded):
        return {path: p + updates[path] for path, p in params.items()}
    assert isinstance(updates, Sharded)
    return params.map(torch.add, values(updates))


def _by_path(params: Tree, updates: Tree) -> dict[str, torch.Tensor]:
    """Path -> the update of each leaf, flat."""
    if not isinstance(params, Sharded):
        return {path: torch.broadcast_to(updates[path], p.shape).detach().reshape(-1) for path, p in params.items()}
    assert isinstance(updates, Sharded)
    out, updates = dict[str, torch.Tensor](), values(updates)
    for key, group in params.layout.groups.items():
        u, p = updates.local(key), params.local(key)
        in_shape = p.ndim != 1 or p.numel() != params.layout.shard_numel(key)
        pieces: Sequence[torch.Tensor]
        pieces = [torch.broadcast_to(u, p.shape)] if in_shape else params.layout.cut(key, params.rank_of(key), u)
        out |= {slot.path: x.detach().reshape(-1) for slot, x in zip(group.slots, pieces, strict=True)}
    return out
