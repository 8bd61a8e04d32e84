"""Rows of examples of different lengths, one after the other: no padding."""

from __future__ import annotations

from typing import Any, NamedTuple

from fzero.base import pytree


class Ragged(NamedTuple):
    """Examples of different lengths without padding: all their rows, one example after another.

    It is a pytree, and computes nothing. `fz.remote` and `fz.accumulate` cut the rows where they cut the lengths, so a
    rank or microbatch has the rows of its examples. An output that is a `Ragged` arrives as one at the next component.

    With specs, rows go where their lengths go. `fz.Ragged(PartitionSpec(("dp", "sp")), PartitionSpec("dp"))` lays the
    rows of a rank's examples over a further axis.

    Attributes:
        values: `[rows of all examples, ...]`, or a pytree of such tensors.
        lengths: `[examples]`, ints: the number of rows of each.

    Raises:
        ValueError: when it is used, and its values hold another `Ragged`.

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
