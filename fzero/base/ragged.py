"""Rows of examples of different lengths, one after the other: no padding."""

from __future__ import annotations

from typing import Any, NamedTuple

from fzero.base import pytree


class Ragged(NamedTuple):
    """Examples of different lengths as one tensor of all their rows: the tokens of images of several sizes, say.

    It is a pytree of two leaves and computes nothing. `fz.remote` cuts the rows where it cuts the lengths: a rank that
    has some of the examples has their rows. What a component returns as one arrives as one at the next.

    Attributes:
        values: [rows of all examples, ...], those of one example after those of another.
        lengths: [examples], ints: how many rows each has.

    Example:
        >>> tokens = fz.Ragged(torch.arange(6.0), torch.tensor([2, 0, 3, 1]))
        >>> [example.tolist() for example in tokens.values.split(tokens.lengths.tolist())]
        [[0.0, 1.0], [], [2.0, 3.0, 4.0], [5.0]]
    """

    values: Any
    lengths: Any


def places_in(tree: object) -> dict[int, int]:
    """Of each ragged batch in a tree the place of its values among the leaves, None counted -> that of its lengths."""
    out, place = {}, 0
    for node in pytree.flatten(tree, is_leaf=lambda node: isinstance(node, Ragged))[0]:
        sizes = [len(pytree.flatten(each)[0]) for each in node] if isinstance(node, Ragged) else [1]
        if sizes == [1, 1]:
            out[place] = place + 1
        place += sum(sizes)
    return out
