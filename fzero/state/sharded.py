"""A tree of one kind of state (params, grads, moments) as this rank's flat buffers, and the ways back from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from fzero.base import pytree
from fzero.comm.axis import Axis
from fzero.formats.formats import Format, Plain, Stored
from fzero.state.draw import Draw
from fzero.table.layout import Key, Layout, Slot


class Sharded:
    """One kind of state of all leaves: group key -> this rank's slice of the group's flat buffer.

    A pytree whose leaves are the buffers. `tree["blocks.0.attn.weight"]` is this rank's slice of a leaf (1-D, maybe
    empty), `fz.gather(tree)` the natural tree of full tensors.

    Attributes:
        buffers: the local slices. Where `held` has the same values, only those are stored. A format of several parts
            (a remainder, scales) has the others under `Part(key, part)`.
        held: full buffers in compute dtype (params under ZeRO-1 and 2).
        scale: what these values are multiplied by (the loss scale, for grads).
        kind: "params", or "signed" or "nonnegative" (moments), stored in their policy's formats; otherwise "values".
        draw: what an update of these params rounds with.
    """

    def __init__(
        self,
        layout: Layout,
        axis: Axis,
        structure: Any,
        buffers: Mapping[Any, torch.Tensor],
        held: Mapping[Any, torch.Tensor] | None = None,
        scale: float = 1.0,
        kind: str = "values",
        draw: Draw | None = None,
    ) -> None:
        self.layout, self.axis, self.structure, self.scale = layout, axis, structure, scale
        self.kind, self.draw = kind, draw
        self._buffers, self._held = dict(buffers), dict(held or {})
        self._dead: str | None = None

    def _alive(self) -> None:
        if self._dead:
            raise RuntimeError(self._dead)

    def kill(self, why: str) -> None:
        """Drops the buffers; any later use raises `why`."""
        self._dead, self._buffers, self._held = why, {}, {}

    @property
    def buffers(self) -> dict[Any, torch.Tensor]:
        self._alive()
        return self._buffers

    @property
    def held(self) -> dict[Any, torch.Tensor]:
        self._alive()
        return self._held

    @property
    def device(self) -> torch.device:
        """That computes with this tree."""
        self._alive()
        return next(iter((*self._buffers.values(), *self._held.values()))).device

    @property
    def keys(self) -> tuple[Key, ...]:
        """The groups that this tree has, in the layout's order."""
        self._alive()
        return tuple(key for key in self.layout.groups if key in self._buffers or key in self._held)

    def axis_of(self, key: Key) -> Axis:
        """The axis that a group is cut over; over which it is whole where its rows are not cut."""
        return self.axis if self.layout.groups[key].row.cuts else self.axis.uncut

    def rank_of(self, key: Key) -> int:
        """Which slice of a group's buffer this rank has."""
        return self.axis.rank if self.layout.groups[key].row.cuts else 0

    def format(self, key: Key) -> Format:
        """How a group is stored."""
        return self._stored_as(key)[0]

    def _stored_as(self, key: Key) -> tuple[Format, tuple[object, ...]]:
        """A group's format, and the names of its buffers."""
        if self.kind == "values":
            return Plain((self._buffers if key in self._buffers else self._held)[key].dtype), (key,)
        known = self.layout.formats.get((self.kind, key))
        if known is None:
            policy = self.layout.groups[key].row.policy
            form = policy.param_format if self.kind == "params" else policy.moment_format(self.kind == "signed")
            known = self.layout.formats[self.kind, key] = form, part_names(form, key)
        return known

    def stored(self, key: Key) -> Stored:
        """This rank's slice of a group as it is stored."""
        self._alive()
        form, names = self._stored_as(key)
        if key in self._buffers:
            return Stored(form, tuple([self._buffers[name] for name in names]))
        size = self.layout.shard_numel(key)
        return Stored(form, (self._held[key].narrow(0, self.rank_of(key) * size, size),))

    def local(self, key: Key) -> torch.Tensor:
        """This rank's slice of a group's buffer: decoded values, or the buffer itself where it has them."""
        stored = self.stored(key)
        return stored.to(stored.dtype)

    def locals(self) -> dict[Any, torch.Tensor]:
        return {key: self.local(key) for key in self.keys}

    def pieces(self, key: Key) -> Iterable[tuple[Slot, torch.Tensor]]:
        """Each leaf of a group with this rank's slice of it."""
        pieces = self.layout.cut(key, self.rank_of(key), self.local(key))
        return zip(self.layout.groups[key].slots, pieces, strict=True)

    def __getitem__(self, path: str) -> torch.Tensor:
        self._alive()
        if path not in self.layout.key_of:
            raise KeyError(f"no leaf {path!r}; the leaves are {', '.join(self.layout.key_of)}")
        key, _slot = self.layout.key_of[path]
        if key not in self.keys:
            raise KeyError(f"leaf {path!r} is frozen: it has params, but no grads and no moments")
        return next(piece for other, piece in self.pieces(key) if other.path == path)

    def with_buffers(self, buffers: Mapping[Any, torch.Tensor], scale: float | None = None) -> Sharded:
        """The same leaves, local slices only, with other values."""
        return Sharded(self.layout, self.axis, self.structure, buffers, None, self.scale if scale is None else scale)

    def replaced(self, **changes: Any) -> Sharded:
        """A new tree with some of the constructor's arguments changed; buffers are shared."""
        names = ("layout", "axis", "structure", "buffers", "held", "scale", "kind", "draw")
        return Sharded(**{name: getattr(self, name) for name in names} | changes)

    def map(self, fn: Callable[..., torch.Tensor], *rest: Sharded) -> Sharded:
        """`fn` over the local slices of trees of the same groups."""
        return self.with_buffers({key: fn(self.local(key), *[tree.local(key) for tree in rest]) for key in self.keys})

    def only(self, keys: Iterable[Key]) -> Sharded:
        """A view of those of the groups that this tree has, as local slices, stored as they are."""
        self._alive()
        buffers: dict[object, torch.Tensor] = {}
        for key in keys:
            if key in self._buffers or key in self._held:
                buffers.update(zip(self._stored_as(key)[1], self.stored(key).parts, strict=True))
        return self.replaced(buffers=buffers, held=None)

    def drawing(self, draw: Draw) -> Sharded:
        """The same, rounding with these random bits."""
        return self.replaced(draw=draw)

    def over(self, buffers: Mapping[Any, torch.Tensor]) -> Sharded:
        """The same leaves in the same formats, over other buffers."""
        return self.replaced(buffers=buffers, held=None)

    def scaled(self, factor: float) -> Sharded:
        """The values times a factor, which is noted and not computed."""
        return self.replaced(scale=self.scale / factor if factor else float("inf"))

    def __repr__(self) -> str:
        if self._dead:
            return f"Sharded(dead: {self._dead})"
        lines = [
            f"  {row.path}: {tuple(row.shape)} in {key}"
            for row in self.layout.rows
            if (key := self.layout.key_of[row.path][0]) in self.keys
        ]
        return f"Sharded({self.axis}\n" + "\n".join(lines) + ")"


def _flatten(tree: Sharded) -> tuple[tuple[torch.Tensor, ...], object]:
    metadata = _Static(
        tree.layout,
        tree.axis,
        tuple(tree.buffers),
        tuple(tree.held),
        pytree.Unseen((tree.structure, tree.scale, tree.kind, tree.draw)),
    )
    return (*tree.buffers.values(), *tree.held.values()), metadata


def _unflatten(metadata: _Static, children: tuple[Any, ...]) -> Sharded:
    structure, scale, kind, draw = metadata.rest.value
    count = len(metadata.buffers)
    if kind != "values":
        _check_codes(metadata, kind, children)
    return Sharded(
        metadata.layout,
        metadata.axis,
        structure,
        dict(zip(metadata.buffers, children[:count], strict=True)),
        dict(zip(metadata.held, children[count:], strict=True)),
        scale,
        kind,
        draw,
    )


def _check_codes(metadata: _Static, kind: str, children: tuple[object, ...]) -> None:
    """Refuses what a tree_map computed from codes as if they were values."""
    for name, child in zip(metadata.buffers, children, strict=False):
        group = metadata.layout.groups[group_of(name)]
        policy = group.row.policy
        form = policy.param_format if kind == "params" else policy.moment_format(kind == "signed")
        if form.plain or not isinstance(child, torch.Tensor):
            continue
        part = next(part for part, own in zip(form.parts, part_names(form, group.key), strict=True) if own == name)
        if child.dtype != part.dtype:
            raise TypeError(
                f"leaf {group.slots[0].path!r} and its group are stored as {form}: got a buffer of {child.dtype}, "
                f"expected {part.dtype}. The buffers of such a tree are codes, not values: compute on "
                "tree.map(fn), which decodes, or on fz.gather(tree)."
            )


class Part(NamedTuple):
    """The name of a further buffer of a group: a remainder, scales."""

    group: Key
    part: str


def part_names(form: Format, key: Key) -> tuple[object, ...]:
    """The names of the buffers of a group: the first has the group's own, the others are `Part`s of it."""
    return tuple(Part(key, part.name) if part.name else key for part in form.parts)


def group_of(name: Key | Part) -> Key:
    """The group that a buffer belongs to."""
    return name.group if isinstance(name, Part) else name


class _Static:
    """What two trees must share to be mapped together: layout, axis and which buffers there are."""

    __slots__ = ("axis", "buffers", "held", "layout", "rest")

    def __init__(
        self, layout: Layout, axis: Axis, buffers: tuple[Any, ...], held: tuple[Any, ...], rest: pytree.Unseen
    ) -> None:
        self.layout, self.axis, self.buffers, self.held, self.rest = layout, axis, buffers, held, rest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and all(getattr(self, n) == getattr(other, n) for n in self.__slots__)

    def __hash__(self) -> int:
        return hash((self.layout, self.axis, self.buffers, self.held))


pytree.register(Sharded, _flatten, _unflatten)


def is_sharded(node: object) -> bool:
    return isinstance(node, Sharded)
