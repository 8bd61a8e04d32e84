"""Where the values of a new state come from: another state, a checkpoint, files of others; and how they are taken."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from fzero.base import pytree
from fzero.comm.axis import Axis
from fzero.formats.formats import Format, decode, encode, entries, zeros
from fzero.state.items import Item, counted, entry_of, escaped, items_in, leaf_of, of_one_leaf, refilled
from fzero.state.moments import init_extras, init_moments
from fzero.state.placing import memory_of, settle
from fzero.state.sharded import Sharded, is_sharded
from fzero.state.sliced import Sliced, keep_blocks, lies_in_slices, regroup, sliced_in, wide
from fzero.state.train_state import grads_like
from fzero.stores.away import Buffer, tensor_of
from fzero.stores.memories import DEVICE
from fzero.table.layout import Key, Layout
from fzero.table.spec import Spec

Extras = Sequence[tuple[str, str, bool]]  # of each entry of `state.extra`: name, kind, whether it may be dropped


TREES = ("params", "signed", "nonnegative", "values")  # the kinds of items that are trees


class Origin:
    """All that a state is made from."""

    place: str  # where it is, for errors
    call: str  # that allows losses, for errors: "fz.load(path, step, lossy=True)"
    anew: str  # that takes the params alone, for errors
    device: torch.device  # where a source's parts arrive
    kinds: Mapping[str, str]  # of every item that there is, by its name (see `state/items`)
    extras: Extras  # of `state.extra`

    def meet(self, moments: Sequence[Item]) -> None:
        """Told of the moments that the step keeps, before it asks for any."""

    def format(self, name: str, path: str) -> Format | None:
        """What a leaf of a tree is stored as; None where there is none."""
        raise NotImplementedError

    def sliced(self, name: str, path: str) -> Sliced | None:
        """How a leaf that there is is cut into slices; None where it is whole."""
        return None

    def read(
        self, name: str, path: str, start: int, stop: int, into: Sequence[torch.Tensor] | None, rank: int = 0
    ) -> Sequence[torch.Tensor]:
        """The parts of elements [start, stop) of a slice of a leaf, or of the whole leaf; the range may be empty.

        Every rank asks for its range of every leaf, in the same order; and at least once for something of each slice
        where it needs another one than that of its own number.

        Args:
            start: a multiple of 64 where elements share an entry of a part.
            into: where they may be written, of exactly their sizes, until `wait` returns; what is returned without it
                has arrived.
            rank: which slice.
        """
        raise NotImplementedError

    def wait(self) -> None:
        """Waits until what was read into memory has arrived there."""

    def scale(self, name: str) -> float:
        """What the values of a tree are multiplied by."""
        return 1.0

    def value(self, name: str) -> object:
        """A tensor or a number."""
        raise NotImplementedError


@dataclass(frozen=True)
class Move:
    """The values of an origin on their way into a state of a step."""

    origin: Origin
    step: Spec
    device: torch.device  # that computes with the state
    lossy: bool  # whether values may be rounded, and entries dropped
    updates: int  # how many the run has applied
    taken: frozenset[str] | None = None  # the paths of the leaves that are taken; all that there are by default

    def params(self, layout: Layout, axis: Axis, structure: pytree.Spec, base: Sharded | None) -> Sharded:
        """This rank's slices of all params; those that are held whole on the device still.

        Args:
            base: the params where the origin has none.
        """
        empty = Sharded(layout, axis, structure, {}, kind="params")
        return self._tree(empty, layout.groups, "params", "params", base)

    def held(self, params: Sharded) -> Sharded:
        """The params with the full buffers that every rank holds in ZeRO-1 and 2, which are gathered."""
        buffers, held = dict(params.entries), dict[Key, Buffer]()
        for key, group in params.layout.groups.items():
            if not group.row.held:
                continue
            names = params.names(key)
            parts = [tensor_of(buffers.pop(name)) for name in names]
            full = [params.axis_of(key).gather(part, f"the values of {key}") for part in parts]
            held[key] = settle(params, key, "params", group.row.policy.used(full))
            if group.row.beside:
                buffers.update(
                    (name, settle(params, key, "params", part)) for name, part in zip(names, parts, strict=True)
                )
        return params.replaced(buffers=buffers, held=held)

    def begun(self, params: Sharded, overwritten: bool) -> tuple[object, dict[str, object]]:
        """Moments and `state.extra` as they begin; moments need no memory where all of them will be overwritten."""
        return init_moments(self.step, params, without_memory=overwritten), init_extras(self.step, params)

    def moments(self, moments: object, layout: Layout) -> object:
        """The moments, in the places of those that begin."""
        met: list[str] = []
        items = items_in("moments", moments)
        self.origin.meet(items)
        saved = [name for name in self.origin.kinds if name.split(".")[0] == "moments"]
        mine, theirs = of_one_leaf([item.name for item in items]), of_one_leaf(saved)
        new, gone = self._of_leaves(layout, mine, theirs)
        # trees that an optimizer keeps for leaves of one side alone
        free, names = self._free(layout, mine, theirs), {item.name for item in items}
        is_free = lambda name: name.rpartition(".trees.")[0] in free
        new |= {name for name in names if is_free(name) and name not in saved}
        saved = [name for name in saved if name not in gone and not (is_free(name) and name not in names)]
        fill = lambda item: self._first(item) if item.name in new else self._value(item, "moments", met)
        out = refilled("moments", moments, fill)
        if met != saved:
            raise self._otherwise(next((name for name in saved if name not in met), saved[0] if saved else "moments"))
        self._need_same_members(items)
        had = lambda item, path: item not in new if item in mine else self._has(item, path)
        return counted(out, layout, had)

    def _of_leaves(
        self, layout: Layout, mine: Mapping[str, str], theirs: Mapping[str, str]
    ) -> tuple[set[str], set[str]]:
        """The items of one leaf alone (`of_one_leaf`) that begin, and those that go: only one side trains the leaf."""
        there = {leaf for leaf in theirs.values() if self._takes(leaf_of(leaf))}
        new = {name for name, leaf in mine.items() if leaf not in there}
        still = {row.path for row in layout.rows if row.moments is not None and self._takes(row.path)}
        return new, {name for name, leaf in theirs.items() if leaf_of(leaf) not in still}

    def _free(self, layout: Layout, mine: Mapping[str, str], theirs: Mapping[str, str]) -> set[str]:
        """Where optimizers on whole leaves have no leaf, of those that both sides train, whose state lies in slices."""
        shapes = {row.path: row.shape for row in layout.rows}
        both = {*mine.values()} & {*theirs.values()}
        cut = {leaf.rsplit(".", 2)[0] for leaf in both if lies_in_slices(shapes[leaf_of(leaf)])}
        return {leaf.rsplit(".", 2)[0] for leaf in (*mine.values(), *theirs.values())} - cut

    def _has(self, name: str, path: str) -> bool:
        """Whether the moments of a leaf are taken, and there are some."""
        return name in self.origin.kinds and self._format(name, path) is not None

    def _first(self, item: Item) -> object:
        """What a leaf begins with by itself, of which a schedule goes by the run's count."""
        return pytree.Count(self.updates) if isinstance(item.value, pytree.Count) else item.value

    def extra(self, extra: dict[str, object]) -> dict[str, object]:
        """`state.extra`: what both keep alike; what only the step keeps begins, such as a number of a later version."""
        own, kinds = ({name: kind for name, kind, _ in x} for x in (self.step.signature.extras, self.origin.extras))
        for name, kind, expendable in self.origin.extras:
            if own.get(name) != kind and not expendable and not self.lossy:
                raise ValueError(
                    f"{self.origin.place} keeps state.extra[{name!r}] of {kind}, which the step does not. Say "
                    f"{self.origin.call} to drop it, or use a step with the same transforms."
                )
        out = dict(extra)
        for name, value in extra.items():
            met: list[str] = []
            if own[name] == kinds.get(name):
                out[name] = refilled(f"extra.{escaped(name)}", value, lambda item: self._value(item, "moments", met))
                if set(met) != {known for known in self.origin.kinds if entry_of(known) == name}:
                    raise self._otherwise(f"extra.{name}", f"a state.extra[{name!r}]")
        return out

    def grads(self, params: Sharded) -> Sharded | None:
        """The kept grads."""
        if "grads" not in self.origin.kinds:
            return None
        own = grads_like(params).replaced(scale=self.origin.scale("grads"))
        return self._tree(own, own.groups, "grads", "grads", None)

    def _value(self, item: Item, kind: str | None, met: list[str]) -> object:
        """What the origin has of the name of an item, in the item's format."""
        own, entry, have = item.value, entry_of(item.name), self.origin.kinds.get(item.name)
        if entry and have is None and item.kind == "number":
            return own
        # what a transform keeps may begin as params are stored, and go on as values
        if have != item.kind and not (entry and is_sharded(own) and have in TREES):
            raise self._otherwise(item.name, f"a state.extra[{entry!r}]" if entry else "moments")
        met.append(item.name)
        if is_sharded(own):
            if have == "values" and entry:  # of which no table says the dtype
                own = own.with_buffers({key: self._like(item.name, own, key) for key in own.groups})
            return self._tree(own, own.groups, item.name, kind, own).replaced(scale=self.origin.scale(item.name))
        value = self.origin.value(item.name)
        if isinstance(value, torch.Tensor):
            return value.to(self.device if own.device.type == "meta" else own.device)
        return pytree.Count(value) if type(value) is int and have == "count" else value

    def _otherwise(self, name: str, what: str = "moments") -> ValueError:
        return ValueError(
            f"{self.origin.place} has {what} of another {'optimizer' if what == 'moments' else 'structure'} than the "
            f"step's: they do not both have state.{name}, or not of one kind. Use what it was made with, or begin "
            f"anew from the params, with {self.origin.anew}."
        )

    def _need_same_members(self, items: Sequence[Item]) -> None:
        """Refuses moments that another member of a partition has kept so far: in the step's own they would be zero."""
        trees = {item.name: item.value for item in items if is_sharded(item.value) and item.name in self.origin.kinds}
        for name, tree in trees.items():
            word = name.rpartition(".")[2]
            others = [other for other in trees if other != name and other.rpartition(".")[2] == word]
            lost = [path for path in tree if others and self._takes(path) and not self._has(name, path)]
            for path, other in itertools.product(lost, others):
                if self._has(other, path):
                    raise ValueError(
                        f"{self.origin.place}: leaf {path!r} has its moments in state.{other}, and the step keeps them "
                        f"in state.{name}. Use the partition it was made with, or begin anew from the params, with "
                        f"{self.origin.anew}."
                    )

    def _takes(self, path: str) -> bool:
        return self.taken is None or path in self.taken

    def _format(self, name: str, path: str) -> Format | None:
        """What a leaf that is taken is stored as in the origin."""
        return self.origin.format(name, path) if self._takes(path) else None

    def _tree(self, tree: Sharded, keys: Collection[Key], name: str, kind: str | None, base: Sharded | None) -> Sharded:
        """Some groups of a tree, filled; in the memory for a kind of state."""
        buffers = dict[object, Buffer]()
        self._need_kept(name, tree, keys)
        for key in keys:
            waits = kind == "params" and tree.layout.groups[key].row.held  # to be gathered
            parts = self._settled(tree, key, None if waits else kind, self._filled(tree, key, name, base))
            buffers.update(zip(tree.names(key), parts, strict=True))
        self.origin.wait()
        return tree.over(buffers)

    def _settled(self, tree: Sharded, key: Key, kind: str | None, parts: list[torch.Tensor]) -> list[Buffer]:
        """A group's parts in the memory for a kind of state, or on the device; what stays may still be arriving."""
        stays = kind is None or memory_of(tree.layout.groups[key].row, kind) == DEVICE
        if stays and self.device == self.origin.device:
            return [*parts]
        self.origin.wait()
        there = [part.to(self.device) for part in parts]
        return [*there] if kind is None else [settle(tree, key, kind, part) for part in there]

    def _need_kept(self, name: str, tree: Sharded, keys: Collection[Key]) -> None:
        """Refuses to round what may not be."""
        slots = [(own, slot) for own in keys for slot in tree.layout.groups[own].slots]
        for key, slot in slots if not self.lossy else ():
            form, have = tree.format(key), self._format(name, slot.path)
            if have is None:
                continue
            if not form.keeps(have):
                what = name.split(".")[0] if name.split(".")[0] != "extra" else f"state.{name}"
                raise ValueError(
                    f"{self.origin.place}: the {what} of leaf {slot.path!r} are stored as {have}, and would be "
                    f"rounded to {form}. Say {self.origin.call} to round them to nearest, or use a step whose policy "
                    "keeps them, such as fz.Policy.exact()."
                )
            old, new = self.origin.sliced(name, slot.path), sliced_in(tree.layout, slot.leaf)
            if old != new and form.group > 1 and not keep_blocks(tree.layout.rows[slot.leaf].shape, old, new):
                raise ValueError(
                    f"{self.origin.place}: state.{name} of leaf {slot.path!r} is stored as {have}, with a scale for "
                    f"every {form.group} elements of a slice, and the step cuts the leaf into slices of other elements "
                    f"of its shape {tree.layout.rows[slot.leaf].shape}: it would be rounded anew. Say "
                    f"{self.origin.call} to round to nearest, or cut the leaf in pieces of whole scales, with "
                    "fz.parallel.cut(dim, multiple=...)."
                )

    def _filled(self, tree: Sharded, key: Key, name: str, base: Sharded | None) -> list[torch.Tensor]:
        """The parts of this rank's slice of a group; leaves that the origin lacks are those of `base`, or zero."""
        form, size, slots = tree.format(key), tree.layout.shard_numel(key), tree.layout.groups[key].slots
        low, device = tree.rank_of(key) * size, self.origin.device
        whole = all(self._format(name, slot.path) is not None for slot in slots)
        if base is None or base.placed(key).device.type == "meta" or (whole and base.placed(key).away):
            out = list(zeros(form, size, device))
        else:  # what begins at zero is written over; what the optimizer made of the params may be the params
            out = [part.to(device) for part in base.stored(key).parts]
            out = out if base.kind in ("signed", "nonnegative") else [part.clone() for part in out]
        for slot in slots:
            have = self._format(name, slot.path)
            if have is None:
                continue
            start, stop = max(low, slot.offset), min(low + size, slot.offset + slot.numel)
            at, first, last = start - low, start - slot.offset, stop - slot.offset
            if start >= stop:
                at, first, last = 0, 0, 0
            into = [
                target[at // part.every :][: entries(form, part, last - first)]
                for part, target in zip(form.parts, out, strict=True)
            ]
            alike, new = have.parts == form.parts, sliced_in(tree.layout, slot.leaf)
            if (old := self.origin.sliced(name, slot.path)) != new:
                read = lambda rank, count, path=slot.path: self.origin.read(name, path, 0, count, None, rank)
                regroup(form, have, tree.layout, slot, old, read, first, last, into)
                continue
            rank = tree.layout.tensor[0] if new is not None else 0
            got = self.origin.read(name, slot.path, first, last, into if alike else None, rank)
            if first == last:
                continue
            if not alike:
                got = encode(form, decode(have, got, wide(form)))
            for target, value in zip(into, got, strict=True):
                if value is not target:
                    target.copy_(value[: target.numel()])
        return out

    def _like(self, name: str, tree: Sharded, key: Key) -> torch.Tensor:
        """A group's values in a dtype that keeps those of the origin."""
        forms = [self._format(name, slot.path) for slot in tree.layout.groups[key].slots]
        dtypes = [form.dtype for form in forms if form is not None]
        return tree.local(key).to(functools.reduce(torch.promote_types, dtypes)) if dtypes else tree.local(key)
