"""How a tensor lies over data ranks, and which rows of which of them a reader needs: the map that reshards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fzero.components.remote.failure import Failed, Failure, first_of
from fzero.components.remote.values import Meta


class Layout(NamedTuple):
    """A tensor over data ranks.

    Attributes:
        lengths: the rows of each data rank, of a tensor that is joined of rows.
        shape, dtype, device: of the whole tensor; the device is where its parts lie.
        weights: of the parts of a mean or a sum.
    """

    kind: str
    lengths: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    weights: tuple[float, ...]


class Read(NamedTuple):
    """Rows start to stop of one data rank's part; all of it where stop is -1."""

    data_rank: int
    start: int
    stop: int


def layout_of(metas: Sequence[Meta | Failure], component: str) -> Layout:
    """The layout of a tensor of which these are the parts, by data rank.

    Raises:
        Failed: a part failed, or they do not fit together.
    """
    failures = [meta for meta in metas if isinstance(meta, Failure)]
    if failures:
        raise Failed(first_of(failures))
    parts = [meta for meta in metas if isinstance(meta, Meta)]
    first = parts[0]
    joined = first.kind == "rows"
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
    return Layout(first.kind, lengths, shape, first.dtype, first.device, tuple([part.weight for part in parts]))


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
    ranks = range(len(layout.weights))
    if layout.kind == "rows":
        start, stop = rows or (0, layout.shape[0])
        out, offset = [], 0
        for rank in ranks:
            low, high = max(start, offset), min(stop, offset + layout.lengths[rank])
            if low < high:
                out.append(Read(rank, low - offset, high - offset))
            offset += layout.lengths[rank]
        return out
    if layout.kind == "same":
        start, stop = rows or (0, -1)
        return [Read(choice % len(ranks), start, stop)]
    return [Read(rank, 0, -1) for rank in ranks]


def joined(layout: Layout, rows: tuple[int, int] | None, parts: Sequence[torch.Tensor], component: str) -> torch.Tensor:
    """The tensor, or some rows of it, of the parts that `reads_of` names."""
    if layout.kind == "rows" and not parts:
        return torch.empty((0, *layout.shape[1:]), dtype=layout.dtype, device="cpu")
    if len(parts) == 1:
        return parts[0] if layout.kind != "sum" else _scaled(parts[0], layout.weights[0])
    if layout.kind == "rows":
        return torch.cat([*parts])
    if layout.kind == "alike":
        return _alike(parts, component)
    if layout.kind == "sum":
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return _scaled(total, layout.weights[0])
    wide = torch.complex128 if layout.dtype.is_complex else torch.float64
    terms = [part.to(wide) * weight for part, weight in zip(parts, layout.weights, strict=True) if weight]
    total = terms[0]  # in rank order
    for term in terms[1:]:
        total = total + term
    return total.to(layout.dtype)


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
