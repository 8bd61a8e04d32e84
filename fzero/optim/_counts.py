"""Updates of leaves that have seen fewer of them than the run: each part of a tree goes by its own leaves' count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero.base import pytree
from fzero.state.sharded import Sharded
from fzero.table.layout import Key

Span = tuple[slice, int, int, int]  # which slots of a group, [start, stop) of this rank's slice of it, `began`


def spans(count: pytree.Count, tree: Sharded, key: Key) -> Sequence[Span]:
    """The parts of this rank's slice of a group whose leaves have one count, `count.value - began`.

    All ranks have as many of them; those of slots of which this rank has nothing are empty.
    """
    layout, rank = tree.layout, tree.rank_of(key)
    known = layout.spans.get((key, rank, count.began))
    if known is None:
        began, found = dict(count.began), list[Span]()
        pieces = layout.pieces(key, rank)
        for place, (slot, start, _) in enumerate(pieces):
            own = began.get(slot.path, 0)
            if not found or found[-1][3] != own:
                found[-1:] = [(slice(a.start, place), low, start, its) for a, low, _, its in found[-1:]]
                found.append((slice(place, len(pieces)), start if found else 0, layout.shard_numel(key), own))
        known = layout.spans[key, rank, count.began] = tuple(found)
    return known


def by_counts(count: pytree.Count, update: Callable[..., tuple[Any, ...]], like: Any, *trees: Any) -> tuple[Any, ...]:
    """`update(number, like, *trees)`, trees like these, where `number` counts this update of the leaves in them.

    If leaves differ in that, it is called for lists of those parts that have the same number.
    """
    if not count.began:
        return update(count.value + 1, like, *trees)
    if isinstance(like, Sharded):
        cuts = [(key, *span[1:]) for key in like.groups for span in spans(count, like, key) if span[1] < span[2]]
        apart = lambda tree: [tree.local(key)[start:stop] for key, start, stop, _ in cuts]
        numbers, spec = [count.value - began + 1 for *_, began in cuts], None
    else:
        apart, own = pytree.leaves, count.own()
        paths, leaves, spec = pytree.named_leaves(like)
        numbers = [own(path) + 1 for path, leaf in zip(paths, leaves, strict=True) if leaf is not None]
    parts = [None if tree is None else apart(tree) for tree in (like, *trees)]
    found = list[list[Any] | None]()
    for number in dict.fromkeys(numbers):
        places = [place for place, other in enumerate(numbers) if other == number]
        made = update(number, *[None if part is None else [part[place] for place in places] for part in parts])
        found = found or [None if part is None else [None] * len(numbers) for part in made]
        for out, part in zip(found, made, strict=True):
            for place, x in zip(places, part or (), strict=False):
                assert out is not None
                out[place] = x

    def joined(out: list[Any] | None) -> Any:
        if out is None:
            return None
        if spec is not None:
            rest = iter(out)
            return pytree.map(lambda leaf: next(rest), like)
        buffers = dict[Key, list[torch.Tensor]]()
        for (key, *_), x in zip(cuts, out, strict=True):
            buffers.setdefault(key, []).append(x)
        return like.with_buffers({key: torch.cat(own) for key, own in buffers.items()})

    return tuple([joined(out) for out in found]) if found else update(count.value + 1, like, *trees)
