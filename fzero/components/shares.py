"""Shares: the examples of a rank, where ranks of other places have smaller parts of the batch.

Every rank has a share of the batch, and splits that into microbatches. A rank whose place is of fewer ranks has several
of the others' shares, one after the other: its microbatches must be made of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fzero.base import pytree
from fzero.components.routes import need_no_ragged
from fzero.table.microbatch import Microbatches


class Shares:
    """How many of the smallest shares a rank has; 1 where every place has as many ranks.

    Args:
        micro: how each share is split.
    """

    def __init__(self, shares: int, micro: Microbatches) -> None:
        self._shares, self._micro = shares, micro

    def apart(self, tree: object, what: str) -> object:
        """Tensors with dims in the order of microbatches: of each the part of every share."""
        return self._ordered(tree, what, self._shares, self._micro.count)

    def together(self, tree: object, what: str) -> object:
        """The inverse: in the order of the shares."""
        return self._ordered(tree, what, self._micro.count, self._shares)

    def inputs_apart(self, inputs: Sequence[object]) -> Sequence[object]:
        """The inputs that are split, in the order of microbatches."""
        return self._inputs(inputs, self._shares, self._micro.count)

    def inputs_together(
        self, inputs: Sequence[object], flat: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Cotangents of the flat inputs in the order of those."""
        if self._shares == 1:
            return list(flat)
        pairs = zip(self._micro.dims(inputs), flat, strict=True)
        first, second = self._micro.count, self._shares
        return [
            x if x is None or dim is None else _ordered(x, dim, "an input's cotangent", first, second)
            for dim, x in pairs
        ]

    def _inputs(self, inputs: Sequence[object], first: int, second: int) -> Sequence[object]:
        if self._shares == 1:
            return inputs
        need_no_ragged(tuple(inputs), "pipeline: an input")
        names, flat, spec = pytree.named_leaves(tuple(inputs))
        dims = self._micro.dims(inputs)
        leaves = [
            _ordered(x, dim, f"input {name}", first, second) if dim is not None and isinstance(x, torch.Tensor) else x
            for name, x, dim in zip(names, flat, dims, strict=True)
        ]
        return pytree.unflatten(spec, leaves)

    def _ordered(self, tree: object, what: str, first: int, second: int) -> object:
        if self._shares == 1:
            return tree
        need_no_ragged(tree, f"pipeline: {what}")
        change = lambda x: _ordered(x, 0, what, first, second) if isinstance(x, torch.Tensor) and x.ndim else x
        return pytree.map_leaves(change, tree)


def _ordered(x: torch.Tensor, dim: int, what: str, first: int, second: int) -> torch.Tensor:
    """Blocks [first, second, rows] of a dim as [second, first, rows]."""
    if not -x.ndim <= dim < x.ndim or x.shape[dim] % (first * second):
        raise ValueError(
            f"pipeline: {what} has shape {tuple(x.shape)}, expected dim {dim} to divide into {first * second} parts: "
            "this place has fewer ranks than others, whose shares of the batch are split into microbatches, each."
        )
    dim %= x.ndim
    blocks = x.unflatten(dim, (first, second, x.shape[dim] // (first * second)))
    return blocks.transpose(dim, dim + 1).flatten(dim, dim + 2)
