"""How many updates the moments of each leaf have seen, beside the run's count in an optimizer's state.

A leaf that was frozen for a while has seen fewer than the run: its bias correction goes by its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from fzero.base import pytree
from fzero.state.items import escaped, leaf_of, of_one_leaf
from fzero.state.sharded import Sharded, is_item, is_sharded, map_trees
from fzero.table.layout import Key, Layout

Span = tuple[int, int, int]  # [start, stop) of this rank's slice of a group, `missed`


def counted(moments: object, layout: Layout, had: Callable[[str, str], bool]) -> object:
    """The moments, whose counts know how many updates each leaf with moments beside them has seen.

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


def by_counts(
    count: pytree.Count, update: Callable[..., tuple[object, ...]], like: object, *trees: object
) -> tuple[object, ...]:
    """`update(number, like, *trees)`, trees like these, where `number` counts this update of the leaves in them.

    If leaves differ in that, it is called once for each number, and each leaf has what is made of its own.
    """
    if not count.missed:
        return update(count.value + 1, like, *trees)
    if not isinstance(like, Sharded):  # leaf by leaf
        (paths, leaves, spec), own = pytree.named_leaves(like), count.own()
        columns = [[None] * len(leaves) if tree is None else pytree.flatten(tree)[0] for tree in trees]
        made = [update(own(path) + 1, *each) for path, *each in zip(paths, leaves, *columns, strict=True)]
        pairs = zip((like, *trees), zip(*made, strict=True), strict=True)
        return tuple([None if tree is None else pytree.unflatten(spec, [*each]) for tree, each in pairs])
    numbers = {n for key in like.groups for _, _, n in spans(count, like, key)} or {0}
    made = {missed: update(count.value - missed + 1, like, *trees) for missed in numbers}

    def chosen(trees: Mapping[int, Sharded]) -> object:
        if next(iter(trees.values())) is None:
            return None
        parts = {key: [trees[n].local(key)[a:b] for a, b, n in spans(count, like, key)] for key in like.groups}
        return like.with_buffers({key: torch.cat(own) for key, own in parts.items()})

    return tuple([chosen(dict(zip(made, each, strict=True))) for each in zip(*made.values(), strict=True)])
