"""fz.parallel.shard_sequence: this rank's piece of a batch of sequences, whose labels are shifted before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fzero.base import pytree
from fzero.base.arguments import need_str, wrong
from fzero.comm.axis import Axis
from fzero.parallel import maps
from fzero.parallel.axis import need_axis, need_dim
from fzero.parallel.ring import ORDERS
from fzero.parallel.visible import options_of

WHO = "parallel.shard_sequence"
IGNORED = -100  # the label of no token, in torch.nn.functional.cross_entropy
DOCUMENTS, POSITIONS = "documents", "position_ids"


def shard_sequence(
    batch: Mapping[str, Any],
    ax: Axis | Sequence[Axis],
    dim: int = 1,
    labels: str | None = "labels",
    order: str = "contiguous",
) -> dict[str, Any]:
    """Takes this rank's tokens of a batch of sequences. The length need not divide by the number of ranks.

    Labels are shifted before the cut, so that no label is lost: `shift_labels` at position i is `labels` at position i
    + 1. It is -100 where the sequence or a document ends.

    Args:
        batch: the whole batch, the same on all ranks: tensors, also in containers, with tokens along `dim`. "documents"
            may hold cumulative lengths, such as [0, 5, 9], of documents that all rows have. They are not cut.
        ax: an axis, from `fz.parallel.axis`. With several, the first one cuts first: `(other, ax)` for
            `fz.parallel.ulysses(fz.parallel.ring(other), ax)`.
        dim: the dim of the tokens.
        labels: key of the labels, if there are any. None shifts nothing.
        order: "contiguous" or "zigzag", for the first axis, as in `fz.parallel.ring`.

    Returns:
        The batch with this rank's tokens, and "shift_labels" instead of "labels". If it has no "position_ids", they are
            added: positions in the whole sequence, counted from 0 in each document.

    Raises:
        TypeError, ValueError: arguments do not fit, or tensors have different numbers of tokens.

    Example:
        >>> def rank_main(rank):
        ...     batch = {"input_ids": torch.tensor([[4, 5, 6]]), "labels": torch.tensor([[4, 5, 6]])}
        ...     piece = fz.parallel.shard_sequence(batch, fz.parallel.axis(None, "sp"))
        ...     return [piece[name].tolist() for name in ("input_ids", "shift_labels", "position_ids")]
        >>> fz.testing.run_ranks(rank_main, 2)
        [[[[4, 5]], [[5, 6]], [[0, 1]]], [[[6]], [[-100]], [[2]]]]
    """
    if not isinstance(batch, Mapping) or not all(isinstance(name, str) for name in batch):
        raise wrong(WHO, "batch", batch, "a dict of tensors")
    axes = [need_axis(each, "shard_sequence") for each in (ax if isinstance(ax, (list, tuple)) else [ax])]
    if not axes:
        raise ValueError(f"{WHO}: got ax=(), expected at least one axis.")
    need_str(labels, WHO, "labels", "the name of the labels or None", or_none=True)
    if order not in ORDERS:
        raise ValueError(f"{WHO}: got order={order!r}, expected one of {', '.join(ORDERS)}.")
    whole = {name: value for name, value in batch.items() if name != DOCUMENTS}
    dim, total, lead = _tokens(whole, dim)
    documents = options_of(WHO, documents=batch.get(DOCUMENTS)).documents
    if documents is not None and documents[-1] != total:
        raise ValueError(f"{WHO}: got documents that end at {documents[-1]}, expected {total}, the number of tokens.")
    bounds = torch.tensor(documents or (0, total), dtype=torch.int64, device="cpu")
    # where the document of each token begins
    starts = bounds[torch.searchsorted(bounds, torch.arange(total, device="cpu"), right=True) - 1]
    if labels is not None and labels in whole:
        shifted = f"shift_{labels}"
        if shifted in whole:
            raise ValueError(f"{WHO}: got both {labels!r} and {shifted!r}, which is made of it. Give one of them.")
        whole[shifted] = _shifted(whole.pop(labels), dim, starts)
    places = _places(total, axes, order)
    out = _cut(whole, axes, dim, places)
    if POSITIONS not in whole:
        like = next(iter(pytree.leaves(whole)))
        out[POSITIONS] = (places - starts[places]).to(like.device).repeat(*lead, 1)
    return {**out, DOCUMENTS: batch[DOCUMENTS]} if DOCUMENTS in batch else out


def _places(total: int, axes: Sequence[Axis], order: str) -> torch.Tensor:
    """Those of this rank's tokens: the first axis cuts in an order, the others what that leaves, in rank order."""
    places = torch.arange(total, device="cpu")
    for number, ax in enumerate(axes):
        if order == "zigzag" and not number:
            parts = places.tensor_split(2 * ax.size)
            places = torch.cat([parts[ax.rank], parts[-1 - ax.rank]])
        else:
            places = places.tensor_split(ax.size)[ax.rank]
    return places


def _tokens(batch: Mapping[str, Any], dim: int) -> tuple[int, int, torch.Size]:
    """The dim of the tokens, their number, and the sizes of the dims before."""
    paths, leaves, _ = pytree.named_leaves(dict(batch))
    found: dict[str, torch.Tensor] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        if leaf is not None and not isinstance(leaf, torch.Tensor):
            raise wrong(WHO, f"batch[{path!r}]", leaf, "a tensor. Pass what has no tokens beside the batch")
        if leaf is not None:
            found[path] = leaf
    if not found:
        raise ValueError(f"{WHO}: got a batch without tensors, expected at least one, such as input_ids.")
    first, like = next(iter(found.items()))
    place = need_dim(dim, like.ndim, "shard_sequence")
    for path, leaf in found.items():
        if leaf.ndim <= place or leaf.shape[place] != like.shape[place]:
            raise ValueError(
                f"{WHO}: got {path} of shape {tuple(leaf.shape)} and {first} of shape {tuple(like.shape)}, expected "
                f"the same number of tokens in dim {place}. Pass what has none beside the batch."
            )
    return place, like.shape[place], like.shape[:place]


def _shifted(labels: torch.Tensor, dim: int, starts: torch.Tensor) -> torch.Tensor:
    """The label of the next token, where there is one in the document."""
    signed = (torch.int8, torch.int16, torch.int32, torch.int64)
    if not isinstance(labels, torch.Tensor) or labels.dtype not in signed:
        raise wrong(WHO, "labels", labels, f"a tensor of integers with a sign, as {IGNORED} is that of no token")
    end = torch.full_like(labels.narrow(dim, 0, min(1, labels.shape[dim])), IGNORED)
    moved = torch.cat([labels.narrow(dim, min(1, labels.shape[dim]), max(labels.shape[dim] - 1, 0)), end], dim)
    last = torch.cat([starts[1:] != starts[:-1], starts.new_ones(min(1, len(starts)), dtype=torch.bool)])
    shape = [1] * dim + [len(last)] + [1] * (labels.ndim - dim - 1)
    return moved.masked_fill(last.to(labels.device).view(shape), IGNORED)


def _cut(batch: dict[str, Any], axes: Sequence[Axis], dim: int, places: torch.Tensor) -> dict[str, Any]:
    """The tokens of tensors at some places; cotangents of whole ones are summed over the ranks."""

    def cut(x: torch.Tensor) -> torch.Tensor:
        for ax in axes:
            x = maps.shared(x, ax)
        return x.index_select(dim, places.to(x.device))

    return pytree.map(cut, batch)  # type: ignore[return-value]
