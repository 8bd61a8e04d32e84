"""Splitting inputs and cotangents into microbatches, and putting outputs together again."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fzero.base import pytree


@dataclass(frozen=True)
class Microbatches:
    """How many, and along which dim every input is split (as in torch.func.vmap; None: not split)."""

    count: int = 1
    in_dims: Any = 0

    def dims(self, inputs: Sequence[object]) -> list[int | None]:
        """The dim of every flat leaf of the inputs; None for what is passed whole."""
        if isinstance(self.in_dims, tuple) and len(self.in_dims) != len(inputs):
            raise ValueError(
                f"accumulate(in_dims=...): got {len(self.in_dims)} dims, expected one per input, {len(inputs)}."
            )
        per_input = self.in_dims if isinstance(self.in_dims, tuple) else (self.in_dims,) * len(inputs)
        out: list[int | None] = []
        for dim, tree in zip(per_input, inputs, strict=True):
            for leaf in pytree.flatten(tree)[0]:
                out.append(dim if isinstance(leaf, torch.Tensor) and dim is not None else None)
        return out

    def split(self, inputs: Sequence[object]) -> list[tuple[Any, ...]]:
        """The inputs of every microbatch."""
        if self.count == 1:
            return [tuple(inputs)]
        names, flat, spec = pytree.named_leaves(tuple(inputs))
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
        return [pytree.unflatten(spec, [column[i] for column in columns]) for i in range(self.count)]

    def merge(self, outputs: Sequence[object], what: str = "outputs") -> Any:
        """The outputs of all microbatches as one.

        Tensors with dims are concatenated along dim 0. 0-d floating ones and Python floats are averaged, in float32 or
        float64; other 0-d ones, Python ints and bools are stacked as [microbatches]. What else there is stays where it
        is the same in all.
        """
        if self.count == 1:
            return outputs[0]
        names, first, spec = pytree.named_leaves(outputs[0])
        columns = [[leaf] for leaf in first]
        for i, other in enumerate(outputs[1:], 1):
            leaves, own = pytree.flatten(other)
            if own != spec:
                raise ValueError(
                    f"accumulate: the function returned {what} {spec} for microbatch 0 and {own} for {i}, expected "
                    "one structure for all. Return the same containers with the same keys every time."
                )
            for column, leaf in zip(columns, leaves, strict=True):
                column.append(leaf)
        named = [f"{what} {name}" if name else what for name in names]
        return pytree.unflatten(spec, [_merged(*pair) for pair in zip(named, columns, strict=True)])

    def split_cotangent(self, cotangent: object, parts: Sequence[Sequence[Part]]) -> tuple[list[Any], float]:
        """The transpose of `merge`, and by what to divide what it is pulled back to.

        A loss's share is 1 / count, which 16 bits do not hold for every count: then it is a power of two, and what is
        left is the second value.

        Args:
            parts: of every microbatch, `parts_of` its outputs.
        """
        if self.count == 1:
            return [cotangent], 1.0
        real = [part for part in parts[0] if part.dtype is not None]
        narrow = any(part.dtype.itemsize == 2 and part.length is None for part in real if part.dtype)
        apart = narrow and all(part.length is None for part in real)
        divisor = 1 << (self.count.bit_length() - 1) if apart else self.count
        names, flat, spec = pytree.named_leaves(cotangent)
        columns = []
        for name, leaf, *own in zip(names, flat, *parts, strict=True):
            columns.append(_split(name or "the output", leaf, own, divisor))
        return [pytree.unflatten(spec, [column[i] for column in columns]) for i in range(self.count)], (
            self.count / divisor
        )

    def merge_inputs(self, inputs: Sequence[object], cotangents: Sequence[Sequence[object]]) -> list[Any]:
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


class Part(NamedTuple):
    """What one microbatch has of an output leaf.

    Attributes:
        length: of dim 0; None where there are no dims.
        dtype: of its cotangent; None where it has none.
    """

    length: int | None
    dtype: torch.dtype | None


def parts_of(outputs: object) -> list[Part]:
    """One `Part` for every leaf of a microbatch's outputs."""
    return [
        Part(o.shape[0] if o.ndim else None, o.dtype if _is_real(o) else None)
        if isinstance(o, torch.Tensor)
        else Part(None, None)
        for o in pytree.flatten(outputs)[0]
    ]


def mean_of(parts: Sequence[object]) -> torch.Tensor:
    """The mean of 0-d floating tensors and Python floats, in float32, or in float64 where one of them is."""
    tensors = [torch.as_tensor(x) if isinstance(x, torch.Tensor) else torch.tensor(x).float() for x in parts]
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return torch.stack([tensor.to(dtype) for tensor in tensors]).mean(0)


def _is_real(x: torch.Tensor) -> bool:
    """Whether a tensor is averaged, and has a cotangent."""
    return x.is_floating_point() or x.is_complex()


def _merged(name: str, parts: list[Any]) -> Any:
    """One leaf of all microbatches' outputs."""
    if all(isinstance(x, torch.Tensor) and x.ndim for x in parts):
        shapes = [tuple(x.shape) for x in parts]
        if len({shape[1:] for shape in shapes}) > 1:
            raise _refused(name, f"of the shapes {shapes}", "one shape but for dim 0, which is concatenated")
        return torch.cat(parts)
    scalars = [x for x in parts if isinstance(x, (numbers.Number, torch.Tensor)) and not getattr(x, "ndim", 0)]
    if len(scalars) == len(parts):
        if any(_is_real(x) if isinstance(x, torch.Tensor) else not isinstance(x, numbers.Integral) for x in parts):
            return mean_of(parts)
        device = next((x.device for x in parts if isinstance(x, torch.Tensor)), None)
        return torch.stack([torch.as_tensor(x, device=device) for x in parts])
    if any(isinstance(x, torch.Tensor) for x in parts) or not all(_same(parts[0], x) for x in parts[1:]):
        some = [f"a tensor of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else repr(x) for x in parts]
        raise _refused(name, " and ".join(some), "tensors, numbers, or something that is the same in all")
    return parts[0]


def _same(x: object, y: object) -> bool:
    try:
        return x is y or bool(x == y)
    except (RuntimeError, TypeError, ValueError):  # what compares element by element
        return False


def _refused(name: str, got: str, expected: str) -> ValueError:
    return ValueError(
        f"accumulate: {name} of the microbatches are {got}, expected {expected}. Return them as tensors with a dim of "
        "examples, or leave them out."
    )


def _split(name: str, leaf: Any, parts: Sequence[Part], divisor: int) -> list[Any]:
    """The cotangents of every microbatch's part of one output leaf."""
    if not isinstance(leaf, torch.Tensor):
        return [leaf] * len(parts)
    dtypes = [part.dtype for part in parts]
    if None in dtypes:
        return [None] * len(parts)
    lengths = [part.length for part in parts]
    if None in lengths:
        expected = torch.float32
        for dtype in dtypes:
            expected = torch.promote_types(expected, dtype or expected)
        if leaf.ndim or leaf.dtype != expected:
            raise ValueError(
                f"cotangent of {name}: got shape {tuple(leaf.shape)} and dtype {leaf.dtype}, expected () and "
                f"{expected}, those of the output, which is the mean over all microbatches. Convert it with .to(...)."
            )
        return [(leaf / divisor).to(dtype) for dtype in dtypes]
    total = sum(length or 0 for length in lengths)
    if leaf.ndim == 0 or leaf.shape[0] != total:
        raise ValueError(
            f"cotangent of {name}: got shape {tuple(leaf.shape)}, expected a leading dim of {total}, that of the "
            "output over all microbatches."
        )
    return list(leaf.split(lengths))  # type: ignore[arg-type]
