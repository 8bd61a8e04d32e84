"""A tree of one kind of state (params, grads, moments) as this rank's flat buffers, and the ways back from them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch

from fzero.base import pytree
from fzero.base.arguments import named
from fzero.base.follow import any_follows, is_transformed
from fzero.comm.axis import Axis
from fzero.formats.bits import _GOLDEN, Counters, _signed, first_of
from fzero.formats.formats import ALIGN, Format, Plain, Stored
from fzero.stores.away import Away, Buffer, Placed, all_owned, shown
from fzero.table.layout import Key, Layout, Slot


@dataclass(frozen=True)
class Draw:
    """The origin of the random bits of one update, the units in which its kernels are to be compiled."""

    seed: int
    count: int
    compiled: frozenset[str] = frozenset()

    def counters(self, layout: Layout, key: Key, rank: int) -> Counters:
        """The counters of rank's shard of a group: those of whole leaves; of a tensor rank's slice its own ones."""
        low, count = rank * layout.shard_numel(key), layout.shard_numel(key) // ALIGN
        runs, end = list[tuple[int, int, int]](), 0
        for slot, start, stop in layout.pieces(key, rank):
            if start < stop:
                cut = layout.rows[slot.leaf].slices is not None and layout.tensor[1] > 1
                own = first_of(self.seed, self.count, f"{slot.path} {layout.tensor[0]}" if cut else slot.path)
                first, end = low + start - slot.offset, -(-stop // ALIGN)
                runs.append((start // ALIGN, _signed(first // ALIGN * _GOLDEN + own), _GOLDEN))
        if end < count:
            runs.append((end, 0, 0))
        return Counters(tuple(runs), count)


class Sharded(Mapping[str, torch.Tensor]):
    """One kind of state of all leaves (params, grads or moments), as this rank's slices.

    - It is a mapping from dotted paths to this rank's slice of each leaf, 1-D, decoded, possibly empty:
      `tree["blocks.0.w"]`, `dict(tree)`.
    - `tree.map(fn)` computes on the slices, in every format. `fz.gather(tree)` gives full tensors.
    - For optree, torch.func and DCP it is a pytree, whose leaves are flat buffers. A buffer holds the slices of all
      leaves of a group: leaves of one unit whose rows in the table are alike. Under a policy that encodes, buffers are
      codes and not values.

    Attributes:
        buffers: `{group key: this rank's flat buffer}`. Those that are offloaded are read, all of them. A format of
            several parts has its remainder or scales under `Part(key, part)`.
        held: full buffers in the compute dtype, for params at ZeRO stages 1 and 2.
        entries: `buffers`, without reading what is offloaded.
        held_entries: `held`, without reading what is offloaded.
        scale: the loss scale that the values carry, for grads. Otherwise 1.
        kind: `"params"`; `"signed"` or `"nonnegative"` for moments; otherwise `"values"`.
        draw: what an update of these params rounds with.
        stale: groups whose full buffers are out of date, as a function was mapped over the tree. They are gathered
            anew.
    """

    def __init__(
        self,
        layout: Layout,
        axis: Axis,
        structure: pytree.Spec,
        buffers: Mapping[Any, Buffer],
        held: Mapping[Any, Buffer] | None = None,
        scale: float = 1.0,
        kind: str = "values",
        draw: Draw | None = None,
        stale: frozenset[Key] = frozenset(),
    ) -> None:
        self.layout, self.axis, self.structure, self.scale = layout, axis, structure, scale
        self.kind, self.draw, self.stale = kind, draw, stale
        self._buffers, away = all_owned(buffers)
        self._held, held_away = all_owned(held or {})
        self.away = away or held_away
        self._dead: str | None = None

    def kill(self, why: str) -> None:
        """Drops the buffers. Later uses raise an error with the text `why`."""
        self._dead, self._buffers, self._held = why, {}, {}

    def __copy__(self) -> Sharded:
        return self.replaced()

    @property
    def entries(self) -> dict[Any, Buffer]:
        if self._dead:
            raise RuntimeError(self._dead)
        return self._buffers

    @property
    def held_entries(self) -> dict[Any, Buffer]:
        if self._dead:
            raise RuntimeError(self._dead)
        return self._held

    @property
    def buffers(self) -> dict[Any, torch.Tensor]:
        return {name: shown(x) for name, x in self.entries.items()}

    @property
    def held(self) -> dict[Any, torch.Tensor]:
        return {name: shown(x) for name, x in self.held_entries.items()}

    @property
    def device(self) -> torch.device:
        """The device that computes with this tree."""
        devices = (x.device for x in entries_of(self) if isinstance(x, (torch.Tensor, Away)))
        return next(devices, torch.device("cpu"))

    @property
    def groups(self) -> tuple[Key, ...]:
        """The keys of the groups of this tree, in the layout's order."""
        own = {name.group if isinstance(name, Part) else name for name in self.entries} | self.held_entries.keys()
        return tuple(own) if len(own) < 2 else tuple([key for key in self.layout.groups if key in own])

    def axis_of(self, key: Key) -> Axis:
        """The axis that a group is cut over. Its size is 1 if the group is whole on each rank."""
        return self.axis if self.layout.groups[key].row.cuts else self.axis.uncut

    def rank_of(self, key: Key) -> int:
        """The number of this rank's slice of a group's buffer."""
        return self.axis.rank if self.layout.groups[key].row.cuts else 0

    def format(self, key: Key) -> Format:
        """The format that a group is stored in."""
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

    def names(self, key: Key) -> tuple[Any, ...]:
        """The names of a group's buffers."""
        return self._stored_as(key)[1]

    def placed(self, key: Key) -> Placed:
        """This rank's slice of a group as it is stored, where it lies."""
        return Placed(*self._parts(key))

    def _parts(self, key: Key) -> tuple[Format, tuple[Any, ...]]:
        buffers, (form, names) = self.entries, self._stored_as(key)
        parts = tuple([buffers[name] for name in names]) if key in buffers else (self._shard_of_held(key),)
        if form.plain and parts[0].dtype != form.dtype:  # as who mapped a function over the buffers made them
            form = Plain(parts[0].dtype)
        return form, parts

    def _shard_of_held(self, key: Key) -> torch.Tensor:
        size = self.layout.shard_numel(key)
        return shown(self.held_entries[key]).narrow(0, self.rank_of(key) * size, size)

    def stored(self, key: Key) -> Stored:
        """This rank's slice of a group as it is stored, on the device."""
        return self.placed(key).stored() if self.away else Stored(*self._parts(key))

    def sizes(self) -> Mapping[object, tuple[int, bool]]:
        """For each buffer of this rank: its number of elements, and whether it must hold values."""
        known = self.layout.sizes.get(self.kind)
        if known is None:
            known = self.layout.sizes[self.kind] = dict[object, tuple[int, bool]]()
            for key in self.layout.groups:
                numel = self.layout.shard_numel(key)
                if self.kind == "values":
                    known[key] = numel, False
                else:
                    form, names = self._stored_as(key)
                    parts = zip(names, form.parts, strict=True)
                    known |= {name: (numel // part.every, form.plain) for name, part in parts}
        return known

    def local(self, key: Key) -> torch.Tensor:
        """This rank's slice of a group's buffer, decoded. The buffer itself if it holds values."""
        if self.kind == "values" and (buffer := self.entries.get(key)) is not None:
            return shown(buffer)
        stored = self.stored(key)
        return stored.to(stored.dtype)

    def follows(self, key: Key) -> bool:
        """True if a transform of `torch.func` goes through this rank's slice of a group."""
        if not is_transformed():
            return False
        # not the slice of a full buffer, as any operation's result is of the transform that is active
        parts = [self.entries[name] for name in self.names(key)] if key in self.entries else []
        return any_follows((*parts, self.held_entries.get(key)))

    def locals(self) -> dict[Key, torch.Tensor]:
        """`local` of each group, by key."""
        return {key: self.local(key) for key in self.groups}

    def pieces(self, key: Key) -> Iterable[tuple[Slot, torch.Tensor]]:
        """Each leaf of a group, as its slot in the buffer, with this rank's slice of it."""
        pieces = self.layout.cut(key, self.rank_of(key), self.local(key))
        return zip(self.layout.groups[key].slots, pieces, strict=True)

    def __getitem__(self, path: str) -> torch.Tensor:
        if path not in self.layout.key_of:
            raise KeyError(f"no leaf {path!r}; the leaves are {', '.join(self.layout.key_of)}. fz.gather gives a tree")
        key, slot = self.layout.key_of[path]
        if key not in self.groups:
            raise KeyError(f"leaf {path!r} is frozen: it has params, but no grads and no moments")
        return next(piece for other, piece in self.pieces(key) if other == slot)

    def __iter__(self) -> Iterator[str]:
        groups = set(self.groups)
        return iter([row.path for row in self.layout.rows if self.layout.key_of[row.path][0] in groups])

    def __len__(self) -> int:
        return sum(len(self.layout.groups[key].slots) for key in self.groups)

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return self is other  # a mapping would compare its tensors

    def __hash__(self) -> int:
        return id(self)

    def with_buffers(self, buffers: Mapping[Any, Buffer], scale: float | None = None) -> Sharded:
        """A tree of the same leaves with other values, as plain slices."""
        return Sharded(self.layout, self.axis, self.structure, buffers, None, self.scale if scale is None else scale)

    def replaced(self, **changes: Any) -> Sharded:
        """A new tree with some of the constructor's arguments changed. Buffers are shared."""
        names = ("layout", "axis", "structure", "scale", "kind", "draw", "stale")
        own: dict[str, Any] = {name: getattr(self, name) for name in names}
        return Sharded(**{**own, "buffers": self.entries, "held": self.held_entries, **changes})

    def map(self, fn: Callable[..., torch.Tensor], *rest: Sharded) -> Sharded:
        """Applies `fn` to this rank's slices, one flat buffer at a time.

        Args:
            fn: `fn(values, *others)` takes and returns 1-D tensors of the same size, decoded, element by element. The
                gaps between leaves pass through `fn` too.
            *rest: further trees with the same groups, such as `state.moments.mu` beside trained params.

        Returns:
            A tree of plain values, in the dtype that `fn` returns.

        Example:
            >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
            >>> params = step.init({"w": torch.ones(3)}).params
            >>> fz.gather(params.map(lambda a, b: a + 2 * b, params))["w"]
            tensor([3., 3., 3.])
        """
        return self.with_buffers({key: fn(self.local(key), *[tree.local(key) for tree in rest]) for key in self.groups})

    def only(self, keys: Iterable[Key]) -> Sharded:
        """A view of the groups with these keys, stored as they are. Keys that this tree lacks are ignored."""
        buffers, keys, own = dict[object, Buffer](), tuple(keys), self.entries
        if not self.held_entries and own.keys() <= set(keys):
            return self.over(own)
        for key in keys:
            if key in own:
                buffers.update([(name, own[name]) for name in self._stored_as(key)[1]])
            elif key in self.held_entries:
                buffers[key] = self._shard_of_held(key)
        return self.over(buffers)

    def over(self, buffers: Mapping[Any, Buffer]) -> Sharded:
        """A tree of the same leaves in the same formats, over other buffers."""
        return self.replaced(buffers=buffers, held=None)

    def scaled(self, factor: float) -> Sharded:
        """The values times a factor, which is noted in `scale` and not computed."""
        return self.replaced(scale=self.scale / factor if factor else float("inf"))

    def __repr__(self) -> str:
        if self._dead:
            return f"Sharded(dead: {self._dead})"
        keys = [(row, self.layout.key_of[row.path][0]) for row in self.layout.rows]
        lines = [f"  {row.path}: {row.shape} in {key}" for row, key in keys if key in self.groups]
        return f"Sharded({self.axis}\n" + "\n".join(lines) + ")"


def _flatten(tree: Sharded) -> tuple[tuple[torch.Tensor, ...], object]:
    # in the layout's order, whatever order somebody put the buffers together in: states are rebuilt by place
    names = tuple([name for name in tree.sizes() if name in tree.entries])
    keys = tuple([key for key in tree.layout.groups if key in tree.held_entries])
    children = (*[shown(tree.entries[name]) for name in names], *[shown(tree.held_entries[key]) for key in keys])
    twice = frozenset(tree.held_entries.keys() & tree.entries.keys())  # stored in slices, and in full beside
    those = [weakref.ref(child) for child in children if isinstance(child, torch.Tensor)] if twice else []
    rest = pytree.Unseen(((tree.structure, tree.scale, tree.kind, tree.draw, tree.stale), twice, those))
    return children, _Static(tree.layout, tree.axis, names, keys, rest)


def _unflatten(metadata: _Static, children: tuple[torch.Tensor, ...]) -> Sharded:
    layout, axis, names, held, rest = metadata
    (structure, *others, stale), twice, those = rest.value
    if twice and not (len(those) == len(children) and all(x is ref() for x, ref in zip(children, those, strict=True))):
        stale = stale | twice
    others.append(stale)
    buffers = dict(zip(names, children, strict=False))
    tree = Sharded(layout, axis, structure, buffers, dict(zip(held, children[len(names) :], strict=True)), *others)
    for key in tree.groups if tree.kind != "values" else ():
        _check_codes(tree, key)
    return tree


def _check_codes(tree: Sharded, key: Key) -> None:
    """Refuses what a tree_map computed from codes as if they were values."""
    form, names = tree._stored_as(key)
    for part, name in zip(form.parts, names, strict=True):
        child = tree.entries.get(name)
        if not form.plain and isinstance(child, torch.Tensor) and child.dtype != part.dtype:
            raise TypeError(
                f"leaf {tree.layout.groups[key].slots[0].path!r} and its group are stored as {form}: got a buffer of "
                f"{child.dtype}, expected {part.dtype}. The buffers of such a tree are codes, not values: compute on "
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


class _Static(NamedTuple):
    """The metadata that two trees must share to be mapped together."""

    layout: Layout
    axis: Axis
    buffers: tuple[object, ...]
    held: tuple[object, ...]
    rest: pytree.Unseen


pytree.register(Sharded, _flatten, _unflatten)


def is_sharded(node: object) -> TypeGuard[Sharded]:
    return isinstance(node, Sharded)


def is_item(node: object) -> bool:
    """True for what a state keeps as one: a sharded tree, a count."""
    return isinstance(node, (Sharded, pytree.Count))


def trees_of(tree: object) -> list[Sharded]:
    """The sharded trees in a pytree."""
    return [node for node in pytree.flatten(tree, is_leaf=is_sharded)[0] if is_sharded(node)]


def map_trees(fn: Callable[..., object], tree: object, *rest: object) -> Any:
    """`fn` over the sharded trees in a pytree, and those at their places in others; its other leaves stay."""
    return pytree.map(lambda x, *xs: fn(x, *xs) if is_sharded(x) else x, tree, *rest, is_leaf=is_sharded)


def check_buffers(who: str, name: str, tree: Sharded) -> None:
    """Refuses buffers that a function mapped over them has made something else than a tree's slices."""
    slices, groups = tree.sizes(), tree.layout.groups
    own = [(entry, buffer, *slices[entry]) for entry, buffer in tree.entries.items()]
    for entry, buffer, count, real in own + [(key, x, groups[key].numel, True) for key, x in tree.held_entries.items()]:
        if not isinstance(buffer, (torch.Tensor, Away)):
            expected = "a buffer"
        elif real and not (buffer.dtype.is_floating_point or buffer.dtype.is_complex):
            expected = "numbers that are no integers"
        elif buffer.numel() != count or (isinstance(buffer, torch.Tensor) and buffer.ndim != 1):
            expected = f"{count} elements in one dimension"
        else:
            continue
        raise ValueError(
            f"{who}: the slice of leaf {groups[group_of(entry)].slots[0].path!r} and its group in {name}: got "
            f"{named(buffer)}, expected {expected}. Map functions that keep shapes."
        )


def entries_of(tree: Sharded) -> list[Buffer]:
    return [*tree.entries.values(), *tree.held_entries.values()]
