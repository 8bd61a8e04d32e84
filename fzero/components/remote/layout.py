"""How a tensor lies over data ranks, and which rows of which of them a reader needs: the map that reshards."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fzero.components.remote.failure import Failed, Failure, first_of
from fzero.components.remote.values import Meta


class Layout(NamedTuple):
    """A tensor over data ranks.

    Attributes:
        lengths: the rows of each data rank, of a tensor that is joined of rows.
        copies: how many ranks of each data rank have parts of sums and means.
        shape, dtype, device: of the whole tensor; the device is where its parts lie.
        weights: of the parts of a mean or a sum.
    """

    kind: str
    lengths: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    weights: tuple[float, ...]
    copies: int = 1


class Read(NamedTuple):
    """Rows start to stop of one rank's part; all of it where stop is -1."""

    data_rank: int
    copy: int
    start: int
    stop: int


def layout_of(metas: Sequence[Meta | Failure], component: str, copies: int = 1) -> Layout:
    """The layout of a tensor of which these are the parts, by data rank.

    Raises:
        Failed: a part failed, or they do not fit together.
    """
    failures = [meta for meta in metas if isinstance(meta, Failure)]
    if failures:
        raise Failed(first_of(failures))
    parts = [meta for meta in metas if isinstance(meta, Meta)]
    first = parts[0]
    joined = first.kind in ("rows", "added")
    for number, part in enumerate(parts):
        ours, theirs = (part.kind, part.dtype, part.shape[joined:]), (first.kind, first.dtype, first.shape[joined:])
        if ours != theirs:
            raise Failed(
                Failure(
                    "ValueError",
                    f"component {component!r}: an output has shape {part.shape} and dtype {part.dtype} on data rank "
                    f"{number}, and {first.shape} and {first.dtype} on data rank 0; expected the same but for dim 0, "
                    "along which they are joined. Let fn return what depends on the batch in dim 0 only.",
                    component,
                    number,
                )
            )
    lengths = tuple([part.shape[0] for part in parts]) if joined else ()
    shape = (sum(lengths), *first.shape[1:]) if joined else first.shape
    return Layout(first.kind, lengths, shape, first.dtype, first.device, tuple([part.weight for part in parts]), copies)


def share(total: int, index: int, count: int) -> tuple[int, int]:
    """The rows that one of several data ranks gets of a batch, as torch.tensor_split cuts it."""
    size, more = divmod(total, count)
    start = index * size + min(index, more)
    return start, start + size + (index < more)


def reads_of(layout: Layout, rows: tuple[int, int] | None, choice: int) -> list[Read]:
    """What to read for some rows of a tensor, or for all of it.

    Args:
        choice: a number of the reader: of what all ranks have alike, readers take different ones.
    """
    ranks, copies = range(len(layout.weights)), range(layout.copies)
    if layout.kind in ("rows", "added"):
        start, stop = rows or (0, layout.shape[0])
        out, offset = [], 0
        for rank in ranks:
            low, high = max(start, offset), min(stop, offset + layout.lengths[rank])
            if low < high:
                wanted = copies if layout.kind == "added" else (choice % layout.copies,)
                out += [Read(rank, copy, low - offset, high - offset) for copy in wanted]
            offset += layout.lengths[rank]
        return out
    if layout.kind == "same":
        start, stop = rows or (0, -1)
        return [Read(choice % len(ranks), choice % layout.copies, start, stop)]
    return [Read(rank, copy, 0, -1) for rank in ranks for copy in copies]


def joined(layout: Layout, rows: tuple[int, int] | None, parts: Sequence[torch.Tensor], component: str) -> torch.Tensor:
    """The tensor, or some rows of it, of the parts that `reads_of` names."""
    if layout.kind in ("rows", "added") and not parts:
        return torch.empty((0, *layout.shape[1:]), dtype=layout.dtype, device="cpu")
    if layout.kind == "added":
        copies = layout.copies
        sums = [_added(parts[first : first + copies]) for first in range(0, len(parts), copies)]
        return _scaled(sums[0] if len(sums) == 1 else torch.cat(sums), layout.weights[0])
    if layout.kind == "sum":
        return _scaled(_added(parts), layout.weights[0])
    if len(parts) == 1:
        return parts[0]
    if layout.kind == "rows":
        return torch.cat([*parts])
    if layout.kind == "alike":
        return _alike(parts, component)
    wide = torch.complex128 if layout.dtype.is_complex else torch.float64
    weights = [weight for weight in layout.weights for _ in range(layout.copies)]
    terms = [part.to(wide) * weight for part, weight in zip(parts, weights, strict=True) if weight]
    return _added(terms).to(layout.dtype)


def _added(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their sum, in rank order."""
    return functools.reduce(torch.add, terms)


def _scaled(tensor: torch.Tensor, weight: float) -> torch.Tensor:
    return tensor if weight == 1.0 else tensor * weight


def _alike(parts: Sequence[torch.Tensor], component: str) -> torch.Tensor:
    for rank, part in enumerate(parts):
        if not bool(((part == parts[0]) | ((part != part) & (parts[0] != parts[0]))).all()):
            raise Failed(
                Failure(
                    "ValueError",
                    f"component {component!r}: an output without dims that is no floating number is {part.item()} on "
                    f"data rank {rank}, and {parts[0].item()} on data rank 0; expected the same on all, as it is not "
                    "averaged. Return it with a dim of examples, or as a floating tensor.",
                    component,
                    rank,
                )
            )
    return parts[0]
