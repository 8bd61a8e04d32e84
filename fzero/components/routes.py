"""Routes: which rows of a value go from which rank of one place of a pipeline to which rank of another."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from fzero.base import pytree
from fzero.base.arguments import named
from fzero.base.ragged import places_in


class Seat(NamedTuple):
    """Where a rank is in a pipeline.

    Attributes:
        place: whose tasks it does.
        data, datas: its number among the place's ranks that have different examples, and their count.
        copy, copies: its number among those that have the same, as the ranks of a tensor axis do, and their count.
    """

    place: int
    data: int
    datas: int
    copy: int
    copies: int


class Route(NamedTuple):
    """A part of a value: from one rank to another, as fractions of the rows that each of them has.

    Attributes:
        source, target: numbers of ranks.
        start, end: of the source's rows; both None where the value is not split, and goes as it is.
    """

    source: int
    target: int
    start: Fraction | None
    end: Fraction | None


def routes(seats: Sequence[Seat], source: int, target: int) -> list[Route]:
    """All routes from one place to another, in the order of the sources.

    Examples are counted through the ranks of a place in the order of `data`; each place splits them equally. Where both
    places have as many ranks with different examples, a value goes from one to the other as it is.
    """
    out = []
    givers = [(rank, seat) for rank, seat in enumerate(seats) if seat.place == source]
    takers = [(rank, seat) for rank, seat in enumerate(seats) if seat.place == target]
    for giver, own in sorted(givers, key=lambda pair: pair[1].data):
        for taker, other in takers:
            if own.copy != other.copy % own.copies:
                continue
            if own.datas == other.datas:
                if own.data == other.data:
                    out.append(Route(giver, taker, None, None))
                continue
            low = max(Fraction(own.data, own.datas), Fraction(other.data, other.datas))
            high = min(Fraction(own.data + 1, own.datas), Fraction(other.data + 1, other.datas))
            if low < high:
                first = Fraction(own.data, own.datas)
                out.append(Route(giver, taker, (low - first) * own.datas, (high - first) * own.datas))
    return out


def cut(tree: object, route: Route, what: str, count: int | None) -> object:
    """The rows of all tensors of a tree that go along a route; the tree itself where it is not split.

    Args:
        count: how many rows each tensor must have; those of the first one where that is not known.
    """
    if route.start is None or route.end is None:
        return tree
    start, end = route.start, route.end
    need_no_ragged(tree, f"pipeline: {what}")

    def rows(leaf: object) -> object:
        nonlocal count
        if leaf is None or isinstance(leaf, (str, bool)):
            return leaf
        if isinstance(leaf, torch.Tensor) and leaf.ndim and count is None:
            count = leaf.shape[0]
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim or leaf.shape[0] != count:
            raise ValueError(
                f"pipeline: {what} has {named(leaf)}, and goes between places with different numbers of ranks that "
                f"have examples of their own; expected tensors whose dim 0 is that of the {count} examples, as others "
                "have no parts that belong to examples. Return it as [examples, ...], or give the places as many ranks."
            )
        places = [leaf.shape[0] * x for x in (start, end)]
        if any(place.denominator > 1 for place in places):
            raise ValueError(
                f"pipeline: {what} has {leaf.shape[0]} rows on each rank, of which one takes a part of {end - start}; "
                "expected a number of examples that divides among the ranks of both places."
            )
        return leaf[int(places[0]) : int(places[1])]

    return pytree.map_leaves(rows, tree)


def need_no_ragged(tree: object, what: str) -> None:
    """Refuses ragged examples where rows are taken by their number."""
    if places_in(tree):
        raise ValueError(
            f"{what} is fz.Ragged, and goes between places with different numbers of ranks that have examples of "
            "their own, by equal numbers of rows; expected tensors of [examples, ...]. Give the places as many ranks, "
            "or take fz.remote components as stages, which cut rows where their examples are cut."
        )


def joined(trees: Sequence[Any], what: str) -> Any:
    """The tree of which the parts came along routes, in their order."""
    if len(trees) == 1:
        return trees[0]
    flat = [pytree.flatten(tree) for tree in trees]
    if any(spec != flat[0][1] for _, spec in flat):
        raise ValueError(f"pipeline: the ranks gave {what} in different structures, expected the same on all.")

    def put(parts: tuple[Any, ...]) -> object:
        if not isinstance(parts[0], torch.Tensor) or not parts[0].ndim:
            return parts[0]
        if len({part.shape[1:] for part in parts}) > 1:
            raise ValueError(
                f"pipeline: the ranks gave {what} of shapes {[tuple(part.shape) for part in parts]}, expected the same "
                "but for dim 0, which is that of examples."
            )
        return torch.cat(parts)

    return pytree.unflatten(flat[0][1], [put(parts) for parts in zip(*[leaves for leaves, _ in flat], strict=True)])
