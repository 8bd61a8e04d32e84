"""Rows of examples of different lengths, one after the other: no padding."""

from __future__ import annotations

from typing import Any, NamedTuple

from fzero.base import pytree


class Ragged(NamedTuple):
    """Examples of different lengths, with all their rows one after the other: the tokens of images of several sizes.

    It is a pytree and computes nothing. `fz.remote` cuts the rows where it cuts the lengths: a rank that has some of
    the examples has their rows. What a component returns as one arrives as one at the next.

    Attributes:
        values: [rows of all examples, ...], those of one example after those of another; or any pytree of such tensors.
        lengths: [examples], ints: how many rows each has.

    Raises:
        ValueError: where one is used whose values hold another one: rows of rows are not cut.

    Example:
        >>> tokens = fz.Ragged(torch.arange(6.0), torch.tensor([2, 0, 3, 1]))
        >>> [example.tolist() for example in tokens.values.split(tokens.lengths.tolist())]
        [[0.0, 1.0], [], [2.0, 3.0, 4.0], [5.0]]
    """

    values: Any
    lengths: Any


def places_in(tree: object) -> dict[int, int]:
    """Of each leaf in the values of ragged batches its place among all leaves, None counted -> that of its lengths."""
    out, place = {}, 0
    for node in pytree.flatten(tree, is_leaf=_is_ragged)[0]:
        if not isinstance(node, Ragged):
            place += 1
            continue
        rows, sizes = pytree.flatten(node.values, is_leaf=_is_ragged)[0], pytree.flatten(node.lengths)[0]
        if any(map(_is_ragged, rows)):
            raise ValueError(
                "fz.Ragged: got values that hold another fz.Ragged, expected tensors of [rows, ...]: rows are cut "
                "where examples are, and not within these. Give two of them side by side, each with lengths of its own."
            )
        if len(sizes) == 1:
            out.update(dict.fromkeys(range(place, place + len(rows)), place + len(rows)))
        place += len(rows) + len(sizes)
    return out


def _is_ragged(node: object) -> bool:
    return isinstance(node, Ragged)
