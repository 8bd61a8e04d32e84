"""What a function returns of a rank's share of the batch that would be taken for something of the whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fzero.base import pytree
from fzero.base.ragged import places_in
from fzero.components.remote.wire import Packed, Skeleton, Slot, children_of, slots_of


class Rows(NamedTuple):
    """A tensor of the outputs on one rank: how many rows it has there, of how many examples."""

    what: str
    number: int
    rows: int
    examples: int


def need_no_numbers(tree: Packed, inputs: object, what: str) -> None:
    """Refuses integers without dims, and Python's numbers: nobody can tell whether they count a rank's examples.

    Those of another value on another rank would be seen, but not a count of 2 on each of two. Bools are compared, and
    those that all ranks have are the whole batch's.

    Args:
        inputs: of the function, whose 0-d tensors it may hand on.
        what: the tree is, in words.
    """
    found: list[object] = [*_numbers(tree.skeleton)]
    known = {x.data_ptr() for x in pytree.flatten(inputs)[0] if isinstance(x, torch.Tensor) and not x.ndim}
    for x in tree.leaves:
        if not x.ndim and not pytree.is_real(x) and x.dtype != torch.bool and x.data_ptr() not in known:
            found.append(x)
    if found:
        raise ValueError(
            f"fz.remote: {what} have {found[0]!r}, a number without dims that is not averaged over the data ranks, "
            "each of which has its share of the batch: it may be a count of the share, which is another one for the "
            "whole batch. Return counts and sizes by example, with a dim (x > 0, not (x > 0).sum()), means as floating "
            "tensors, and numbers of the caller's as 0-d tensors that fn is given and hands on; or say by in_specs= "
            "and out_specs= what is whole on every rank."
        )


def _numbers(skeleton: Skeleton) -> Iterator[object]:
    """The numbers of Python in a tree."""
    kind = skeleton[0]
    if kind == "float":
        yield float.fromhex(skeleton[1])
    elif kind == "Size":
        yield torch.Size(skeleton[1])
    elif kind == "constant" and isinstance(skeleton[1], int):
        yield skeleton[1]
    for child in children_of(skeleton):
        yield from _numbers(child)


def rows_in(tree: Packed, examples: int, what: str) -> Iterator[Rows]:
    """The rows of what is joined by examples; those of ragged ones are known to be other numbers."""
    whole: Any = slots_of(tree.skeleton)
    flat = pytree.flatten(whole)[0]
    ragged = {slot.number for place in places_in(whole) if isinstance(slot := flat[place], Slot)}
    for number, x in enumerate(tree.leaves):
        if x.ndim and number not in ragged:
            yield Rows(what, number, x.shape[0], examples)


def words_of(by_rank: Sequence[Sequence[Rows]]) -> list[str]:
    """What is to be said of outputs that have as many rows on every rank, but not some for each of its examples."""
    out = []
    for own in zip(*by_rank, strict=False):
        first = own[0]
        same = first.rows > 0 and all(each.rows == first.rows for each in own)
        if same and any(not each.examples or each.rows % each.examples for each in own):
            out.append(
                f"tensor {first.number} of the {first.what} has {first.rows} rows on every rank, which have "
                f"{sorted({each.examples for each in own})} examples. Rows of data ranks are joined: if these belong "
                "to no examples, it has more of them than fn gives for the whole batch. Return a mean over examples "
                "without dims, rows of which each example has its own number as fz.Ragged, and say by in_specs= and "
                "out_specs= what is whole on every rank."
            )
    return out
