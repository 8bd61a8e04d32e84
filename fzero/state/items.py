"""What a state keeps, item by item: trees, tensors and numbers, by dotted names; and how often leaves were updated."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from fzero.base import pytree
from fzero.base.arguments import named
from fzero.state.sharded import Sharded, is_item, is_sharded, map_trees
from fzero.state.train_state import TrainState
from fzero.table.layout import Key, Layout

CARRY = "carry"  # the entry of `state.extra` of which each rank has its own
NUMBERS = (bool, int, float, str, type(None))


class Item(NamedTuple):
    """One tree, tensor or number of a state, by its dotted name: "params", "moments.mu", "extra.ema"."""

    name: str
    value: Any

    @property
    def kind(self) -> str:
        """A tree's own kind; "tensor", "count" or "number"."""
        if is_sharded(self.value):
            return self.value.kind
        if isinstance(self.value, torch.Tensor):
            return "tensor"
        return "count" if isinstance(self.value, pytree.Count) else "number"


def items_of(state: TrainState) -> list[Item]:
    """Everything that a state keeps."""
    found = [Item("params", state.params)]
    found += [] if state.grads is None else [Item("grads", state.grads)]
    found += items_in("moments", state.moments)
    for name, value in state.extra.items():
        found += items_in(f"extra.{escaped(name)}", value)
    if twice := [name for name, count in collections.Counter(item.name for item in found).items() if count > 1]:
        raise ValueError(
            f"state.{twice[0]}: got two values of this name, expected one: keys of one dict such as 1 and '1' are the "
            "same there. Give one of them another key."
        )
    return found


def escaped(key: str) -> str:
    """A key as part of a dotted name, in which its own dots are no dots."""
    return key.replace("%", "%25").replace(".", "%2E")


def entry_of(item: str) -> str:
    """The entry of `state.extra` that an item belongs to: of "extra.ema.mean" it is "ema"."""
    return _unescaped(item.split(".")[1]) if item.startswith("extra.") else ""


def leaf_of(item: str) -> str:
    """The leaf that items of moments are of, by what their names begin with (`of_one_leaf`)."""
    return _unescaped(item.rpartition(".")[2])


def _unescaped(key: str) -> str:
    return key.replace("%2E", ".").replace("%25", "%")


def of_one_leaf(items: Iterable[str]) -> dict[str, str]:
    """Items of moments that are of one leaf alone (`WholeState.rest`) -> what their names begin with."""
    parts = {name: name.split(".") for name in items}
    places = {name: own.index("rest") + 2 for name, own in parts.items() if "rest" in own[:-1]}
    return {name: ".".join(parts[name][:place]) for name, place in places.items()}


def items_in(name: str, tree: object) -> list[Item]:
    """The items of the moments or of an entry of `state.extra`."""
    paths, nodes, _ = pytree.named_leaves(tree, is_item, escaped)
    items = [Item(f"{name}.{path}".removesuffix("."), node) for path, node in zip(paths, nodes, strict=True)]
    for item in items:
        if not (is_item(item.value) or isinstance(item.value, (torch.Tensor, *NUMBERS))):
            raise TypeError(
                f"state.{item.name}: got {named(item.value)}, expected a tensor, a number, a str or None: nothing else "
                "is kept in a checkpoint."
            )
    return items


def refilled(name: str, tree: object, value_of: Callable[[Item], object]) -> Any:
    """The moments or an entry of `state.extra` with other values in the same places."""
    _, spec = pytree.flatten(tree, is_leaf=is_item)
    return pytree.unflatten(spec, [value_of(item) for item in items_in(name, tree)])


Span = tuple[int, int, int]  # [start, stop) of this rank's slice of a group, `missed`


def counted(moments: object, layout: Layout, had: Callable[[str, str], bool]) -> object:
    """The moments, whose counts know how many updates each leaf with moments beside them has seen.

    A leaf that was frozen for a while has seen fewer than the run: its bias correction goes by its own.

    Args:
        had: `had(item, path)`, whether a leaf's moments in an item, such as "moments.mu", are those that it had before.
            If they begin, its own count is zero.
    """
    names, nodes, spec = pytree.named_leaves(moments, is_item, escaped)
    names = [f"moments.{name}" for name in names]
    trees = {name: node for name, node in zip(names, nodes, strict=True) if is_sharded(node)}
    alone, frozen = of_one_leaf(names), {row.path for row in layout.rows if row.frozen}

    def one(name: str, node: object) -> object:
        if not isinstance(node, pytree.Count):
            return node
        if name in alone:
            item, paths = name, [leaf_of(alone[name])]
        else:
            beside = f"{name.rpartition('.')[0]}."
            item = next((other for other in trees if other.startswith(beside)), "")
            paths = [*trees[item]] if item else []
        run, before = node.value, node.own()
        own = {path: before(path) if had(item, path) else 0 for path in paths}
        missed = [(path, run - count) for path, count in own.items() if path not in frozen and count != run]
        return pytree.Count(run, tuple(missed), tuple([(path, own[path]) for path in paths if path in frozen]))

    return pytree.unflatten(spec, [one(*each) for each in zip(names, nodes, strict=True)])


def trained_moments(moments: object) -> object:
    """The moments without those that frozen leaves keep, which no update sees."""
    own = lambda tree: tree.only(tree.layout.trainable) if tree.layout.keeping else tree
    return map_trees(own, moments)


def with_kept_moments(new: object, old: object) -> object:
    """The moments after an update, with those that frozen leaves keep."""

    def one(tree: object, before: object) -> object:
        if not (is_sharded(tree) and is_sharded(before) and before.layout.keeping):
            return tree
        every = tree.over({**tree.entries, **before.only(before.layout.keeping).entries})
        return every.only(every.groups)  # in the order that they were in

    return map_trees(one, new, old)


def spans(count: pytree.Count, tree: Sharded, key: Key) -> Sequence[Span]:
    """The parts of this rank's slice of a group whose leaves have one count, `count.value - missed`."""
    layout, rank = tree.layout, tree.rank_of(key)
    known = layout.spans.get((key, rank, count.missed))
    if known is None:
        missed, found = dict(count.missed), list[Span]()
        for slot, start, _ in layout.pieces(key, rank):
            own = missed.get(slot.path, 0)
            if not found or found[-1][2] != own:
                found[-1:] = [(low, start, its) for low, _, its in found[-1:]]
                found.append((start if found else 0, layout.shard_numel(key), own))
        known = layout.spans[key, rank, count.missed] = tuple(found)
    return known
