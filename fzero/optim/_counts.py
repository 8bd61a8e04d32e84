"""Updates of leaves that have seen fewer of them than the run: each part of a tree goes by its own leaves' count."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

    If leaves differ in that, it is called for lists of those parts that have the same number.
    """
    if not count.missed:
        return update(count.value + 1, like, *trees)
    if isinstance(like, Sharded):
        cuts = [(key, span) for key in like.groups for span in spans(count, like, key) if span[0] < span[1]]
        counted = [(span[2], count.value - span[2] + 1) for _, span in cuts]
    else:
        (paths, leaves, _), own, cuts = pytree.named_leaves(like), count.own(), []
        missed, paused = dict(count.missed), dict(count.paused)
        present = [path for path, leaf in zip(paths, leaves, strict=True) if leaf is not None]
        counted = [((missed.get(path, 0), paused.get(path)), own(path) + 1) for path in present]
    numbers: dict[object, int] = dict(counted)  # by what tells them apart, as a graph's have no values

    def apart(tree: object) -> list[torch.Tensor] | None:
        if isinstance(tree, Sharded):
            return [tree.local(key)[span[0] : span[1]] for key, span in cuts]
        return None if tree is None else pytree.leaves(tree)

    def joined(parts: list[torch.Tensor] | None) -> object:
        if parts is None:
            return None
        if not isinstance(like, Sharded):
            rest = iter(parts)
            return pytree.map(lambda leaf: next(rest), like)
        buffers = dict[Key, list[torch.Tensor]]()
        for (key, _), x in zip(cuts, parts, strict=True):
            buffers.setdefault(key, []).append(x)
        return like.with_buffers({key: torch.cat(own) for key, own in buffers.items()})

    parts, made = [apart(tree) for tree in (like, *trees)], dict[object, tuple[object, ...]]()
    places = {kind: [place for place, (own, _) in enumerate(counted) if own == kind] for kind in numbers}
    for kind, own in places.items():
        given = [None if part is None else [part[place] for place in own] for part in parts]
        made[kind] = update(numbers[kind], *given)
    if not made:
        return update(count.value + 1, like, *trees)
    out = list[object]()
    for each in zip(*made.values(), strict=True):
        found = {
            place: x
            for own, part in zip(places.values(), each, strict=True)
            if part is not None
            for place, x in zip(own, part, strict=True)
        }
        out.append(joined([found[place] for place in range(len(counted))] if found else None))
    return tuple(out)
