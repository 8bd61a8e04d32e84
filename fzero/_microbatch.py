"""Splitting inputs and cotangents into microbatches, and putting outputs together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero import _tree


@dataclass(frozen=True)
class Microbatches:
    """How many, and along which dim every input is split (as in torch.func.vmap; None: not split)."""

    count: int = 1
    in_dims: Any = 0

    def dims(self, inputs: Sequence[Any]) -> list[int | None]:
        """The dim of every flat leaf of the inputs; None for what is passed whole."""
        if isinstance(self.in_dims, tuple) and len(self.in_dims) != len(inputs):
            raise ValueError(
                f"accumulate(in_dims=...): got {len(self.in_dims)} dims, expected one per input, {len(inputs)}."
            )
        per_input = self.in_dims if isinstance(self.in_dims, tuple) else (self.in_dims,) * len(inputs)
        out: list[int | None] = []
        for dim, tree in zip(per_input, inputs, strict=True):
            for leaf in _tree.flatten(tree)[0]:
                out.append(dim if isinstance(leaf, torch.Tensor) and dim is not None else None)
        return out

    def split(self, inputs: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The inputs of every microbatch."""
        if self.count == 1:
            return [tuple(inputs)]
        names, flat, spec = _tree.named_leaves(tuple(inputs))
        columns = []
        for name, leaf, dim in zip(names, flat, self.dims(inputs), strict=True):
            if dim is None:
                columns.append([leaf] * self.count)
                continue
            if leaf.ndim == 0 or leaf.shape[dim] % self.count:
                raise ValueError(
                    f"accumulate: input {name} has shape {tuple(leaf.shape)}, expected dim {dim} to divide into "
                    f"{self.count} microbatches. Change the batch size or the number of microbatches, or pass in_dims= "
                    "with None for inputs that are not split."
                )
            columns.append(list(leaf.chunk(self.count, dim)))
        return [_tree.unflatten(spec, [column[i] for column in columns]) for i in range(self.count)]

    def merge(self, outputs: Sequence[Any]) -> Any:
        """The outputs of all microbatches as one: scalars are averaged, tensors concatenated along dim 0."""
        if self.count == 1:
            return outputs[0]

        def one(*parts: Any) -> Any:
            if not isinstance(parts[0], torch.Tensor):
                return parts[0]
            if parts[0].ndim:
                return torch.cat(parts)
            return torch.stack(parts).mean(0) if parts[0].is_floating_point() else torch.stack(parts).sum(0)

        return _tree.map(one, outputs[0], *outputs[1:])

    def split_cotangent(self, cotangent: Any, sizes: Sequence[Sequence[int | None]]) -> list[Any]:
        """The transpose of `merge`; `sizes[i]` the leading sizes of microbatch i's output leaves, None if scalar."""
        if self.count == 1:
            return [cotangent]
        names, flat, spec = _tree.named_leaves(cotangent)
        columns = []
        for place, (name, leaf) in enumerate(zip(names, flat, strict=True)):
            if not isinstance(leaf, torch.Tensor):
                columns.append([leaf] * self.count)
                continue
            lengths = [size[place] if place < len(size) else None for size in sizes]
            if leaf.ndim == 0:
                columns.append([leaf / self.count if leaf.is_floating_point() else leaf] * self.count)
                continue
            if any(length is None for length in lengths) or sum(lengths) != leaf.shape[0]:  # type: ignore[arg-type]
                raise ValueError(
                    f"cotangent of {name or 'the output'}: got shape {tuple(leaf.shape)}, expected a leading dim of "
                    f"{sum(length or 0 for length in lengths)}, that of the output over all microbatches."
                )
            columns.append(list(leaf.split(lengths)))  # type: ignore[arg-type]
        return [_tree.unflatten(spec, [column[i] for column in columns]) for i in range(self.count)]

    def merge_inputs(self, inputs: Sequence[Any], cotangents: Sequence[Sequence[Any]]) -> list[Any]:
        """Cotangents of the flat inputs: concatenated where an input was split, summed where it was passed whole."""
        if self.count == 1:
            return list(cotangents[0])
        out = []
        for dim, parts in zip(self.dims(inputs), zip(*cotangents, strict=True), strict=True):
            if parts[0] is None:
                out.append(None)
            elif dim is None:
                out.append(torch.stack(parts).sum(0))
            else:
                out.append(torch.cat(parts, dim))
        return out


def leading_sizes(outputs: Any) -> list[int | None]:
    return [o.shape[0] if isinstance(o, torch.Tensor) and o.ndim else None for o in _tree.flatten(outputs)[0]]
