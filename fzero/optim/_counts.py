"""Updates of leaves that have seen fewer of them than the run: each part of a tree goes by its own leaves' count."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fzero.base import pytree
from fzero.state.sharded import Sharded
from fzero.table.layout import Key

Span = tuple[int, int, int]  # [start, stop) of this rank's slice of a group, `missed`


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
    kinds, numbers = list[object](), dict[object, int]()  # by what tells numbers apart, as a graph's have no values
    if isinstance(like, Sharded):
        numbers = {n: count.value - n + 1 for key in like.groups for _, _, n in spans(count, like, key)}
    else:
        (paths, leaves, _), own = pytree.named_leaves(like), count.own()
        missed, paused = dict(count.missed), dict(count.paused)
        for path in [path for path, leaf in zip(paths, leaves, strict=True) if leaf is not None]:
            kinds.append((missed.get(path, 0), paused.get(path)))
            numbers[kinds[-1]] = own(path) + 1
    made = {kind: update(number, like, *trees) for kind, number in (numbers or {None: count.value + 1}).items()}

    def chosen(trees: Mapping[object, Any]) -> object:
        if next(iter(trees.values())) is None:
            return None
        if isinstance(like, Sharded):
            parts = {key: [trees[n].local(key)[a:b] for a, b, n in spans(count, like, key)] for key in like.groups}
            return like.with_buffers({key: torch.cat(own) for key, own in parts.items()})
        leaves = {kind: pytree.leaves(tree) for kind, tree in trees.items()}
        rest = iter([leaves[kind][place] for place, kind in enumerate(kinds)])
        return pytree.map(lambda _: next(rest), like)

    return tuple([chosen(dict(zip(made, each, strict=True))) for each in zip(*made.values(), strict=True)])
