"""Shares: the examples of a rank, where ranks of other places have smaller parts of the batch.

Every rank has a share of the batch, and splits that into microbatches. A rank whose place is of fewer ranks has several
of the others' shares, one after the other: its microbatches must be made of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fzero.base import pytree
from fzero.components.routes import need_no_ragged
from fzero.table.counting import Counts
from fzero.table.microbatch import Microbatches


class Shares:
    """How many of the smallest shares a rank has; 1 where every place has as many ranks.

    Args:
        micro: how each share is split.
        sizes: the examples that each microbatch of a share has, where they differ.
    """

    def __init__(self, shares: int, micro: Microbatches) -> None:
        self.count, self._micro = shares, micro
        self.sizes: Sequence[int] | None = None

    def count_examples(self, inputs: Sequence[object], counts: Counts) -> None:
        """Notes how many examples microbatches have, here and of each share."""
        sizes = self._micro.examples(inputs)
        if sizes is not None:
            own = self._micro.sizes(sum(sizes) // self.count)
            self.sizes = own if len({*own}) > 1 else None
            counts.split([size * self.count for size in own])

    def apart(self, tree: object, what: str) -> object:
        """Tensors with dims in the order of microbatches: of each the part of every share."""
        return self._ordered(tree, what, False)

    def together(self, tree: object, what: str) -> object:
        """The inverse: in the order of the shares."""
        return self._ordered(tree, what, True)

    def inputs_apart(self, inputs: Sequence[object]) -> Sequence[object]:
        """The inputs that are split, in the order of microbatches."""
        if self.count == 1:
            return inputs
        need_no_ragged(tuple(inputs), "pipeline: an input")
        names, flat, spec = pytree.named_leaves(tuple(inputs))
        leaves = [
            x if dim is None or not isinstance(x, torch.Tensor) else self._moved(x, dim, f"input {name}", False)
            for name, x, dim in zip(names, flat, self._micro.dims(inputs), strict=True)
        ]
        return pytree.unflatten(spec, leaves)

    def inputs_together(
        self, inputs: Sequence[object], flat: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Cotangents of the flat inputs in the order of those."""
        if self.count == 1:
            return list(flat)
        pairs = zip(self._micro.dims(inputs), flat, strict=True)
        return [
            x if x is None or dim is None else self._moved(x, dim, "an input's cotangent", True) for dim, x in pairs
        ]

    def _ordered(self, tree: object, what: str, back: bool) -> object:
        if self.count == 1:
            return tree
        need_no_ragged(tree, f"pipeline: {what}")
        change = lambda x: self._moved(x, 0, what, back) if isinstance(x, torch.Tensor) and x.ndim else x
        return pytree.map_leaves(change, tree)

    def _moved(self, x: torch.Tensor, dim: int, what: str, back: bool) -> torch.Tensor:
        """A dim of all shares, one after the other, in the order of microbatches; or the way back."""
        rows, examples = -1, sum(self.sizes or ())
        if -x.ndim <= dim < x.ndim and not x.shape[dim] % self.count:
            rows = x.shape[dim] // self.count
        if rows < 0 or (self.sizes and rows % examples):
            raise ValueError(
                f"pipeline: {what} has shape {tuple(x.shape)}, expected dim {dim} to divide into {self.count} parts of "
                f"equal size{f', of a multiple of {examples} rows' if self.sizes else ''}: this place has fewer ranks "
                "than others, whose shares of the batch are split into microbatches, each."
            )
        own = [size * (rows // examples) for size in self.sizes] if self.sizes else self._micro.sizes(rows)
        if back:
            blocks = x.split([size for size in own for _ in range(self.count)], dim)
            order = [blocks[i * self.count + share] for share in range(self.count) for i in range(len(own))]
        else:
            blocks = [share.split(own, dim) for share in x.split(rows, dim)] if rows else [[x]]
            order = [share[i] for i in range(len(blocks[0])) for share in blocks]
        return torch.cat(order, dim)
