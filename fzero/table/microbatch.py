"""Splitting inputs and cotangents into microbatches, and putting outputs together again."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fzero.base import pytree
from fzero.base.arguments import named, wrong
from fzero.base.ragged import places_in
from fzero.base.rebound import tensors_inside


@dataclass(frozen=True)
class Microbatches:
    """How many, and along which dim every input is split (as in torch.func.vmap; None: not split)."""

    count: int = 1
    in_dims: int | tuple[int | None, ...] | None = 0

    def leaves(self, inputs: Sequence[object]) -> list[tuple[int | None, object]]:
        """The flat leaves of the inputs, each behind the dim of its input."""
        per_input = self.in_dims if isinstance(self.in_dims, tuple) else (self.in_dims,) * len(inputs)
        if len(per_input) != len(inputs):
            raise ValueError(
                f"accumulate(in_dims=...): got {len(per_input)} dims, expected one per input, {len(inputs)}."
            )
        return [(dim, leaf) for dim, tree in zip(per_input, inputs, strict=True) for leaf in pytree.flatten(tree)[0]]

    def dims(self, inputs: Sequence[object]) -> list[int | None]:
        """The dim of every flat leaf of the inputs; None for what is passed whole."""
        pairs = self.leaves(inputs)
        for leaf in [leaf for dim, leaf in pairs if dim is not None and not isinstance(leaf, torch.Tensor)]:
            _refuse_rows_inside(leaf)
        return [dim if isinstance(leaf, torch.Tensor) else None for dim, leaf in pairs]

    def split(self, inputs: Sequence[object]) -> list[tuple[object, ...]]:
        """The inputs of every microbatch; of ragged examples each has the rows of its own."""
        if self.count == 1:
            return [tuple(inputs)]
        names, flat, spec = pytree.named_leaves(tuple(inputs))
        columns: list[Sequence[object]] = []
        dims, ragged = self.dims(inputs), places_in(tuple(inputs))
        for place, (name, leaf, dim) in enumerate(zip(names, flat, dims, strict=True)):
            dim = None if place in ragged else dim
            if dim is not None and (not -leaf.ndim <= dim < leaf.ndim or leaf.shape[dim] % self.count):
                raise ValueError(
                    f"accumulate: input {name} has shape {tuple(leaf.shape)}, expected dim {dim} to divide into "
                    f"{self.count} microbatches. Change the batch size or the number of microbatches, or pass in_dims= "
                    "with None for inputs that are not split."
                )
            columns.append([leaf] * self.count if dim is None else leaf.chunk(self.count, dim))
        for place, lengths in ragged.items():
            columns[place] = self._rows(flat[place], columns[lengths], names[place], dims[lengths])
        return [pytree.unflatten(spec, [column[i] for column in columns]) for i in range(self.count)]

    def _rows(self, rows: object, lengths: Sequence[object], name: str, dim: int | None) -> Sequence[object]:
        """The rows of every microbatch's examples."""
        if dim is None or not isinstance(rows, torch.Tensor):
            return [rows] * self.count
        sizes = [int(own.sum()) for own in lengths if isinstance(own, torch.Tensor)]
        if dim != 0 or not rows.ndim or sum(sizes) != rows.shape[0]:
            raise ValueError(
                f"accumulate: input {name} is {named(rows)}, and the lengths of its examples add up to {sum(sizes)}; "
                "expected as many rows, and in_dims of 0 or None for fz.Ragged."
            )
        return rows.split(sizes)

    def merge(self, outputs: Sequence[object], what: str = "outputs") -> Any:
        """The outputs of all microbatches as one.

        Tensors with dims are concatenated along dim 0. 0-d floating ones and Python floats are averaged, in float32 or
        float64; other 0-d ones, Python ints and bools are stacked as [microbatches]. What else there is stays where it
        is the same in all.
        """
        if self.count == 1:
            return outputs[0]
        names, _, spec = pytree.named_leaves(outputs[0])
        flat = [pytree.flatten(output) for output in outputs]
        for i, (_, own) in enumerate(flat):
            if own != spec:
                raise ValueError(
                    f"accumulate: the function returned {what} {spec} for microbatch 0 and {own} for {i}, expected "
                    "one structure for all. Return the same containers with the same keys every time."
                )
        columns = zip(names, *[leaves for leaves, _ in flat], strict=True)
        return pytree.unflatten(spec, [_merged(f"{what} {name}" if name else what, own) for name, *own in columns])

    def split_cotangent(self, cotangent: object, parts: Sequence[Sequence[Part]]) -> tuple[list[object], float]:
        """The transpose of `merge` by `parts_of` every microbatch, and by what to divide what it is pulled back to.

        A loss's share is 1 / count, which 16 bits do not hold for every count: then it is a power of two, and what is
        left is the second value.
        """
        if self.count == 1:
            return [cotangent], 1.0
        real = [(part.length, part.dtype.itemsize) for part in parts[0] if part.dtype]
        apart = all(length is None for length, _ in real) and any(size == 2 for _, size in real)
        divisor = 1 << (self.count.bit_length() - 1) if apart else self.count
        names, flat, spec = pytree.named_leaves(cotangent)
        columns = [
            _split(name or "the output", leaf, own, divisor)
            for name, leaf, *own in zip(names, flat, *parts, strict=True)
        ]
        pieces = [pytree.unflatten(spec, [column[i] for column in columns]) for i in range(self.count)]
        return pieces, self.count / divisor

    def merge_inputs(
        self, inputs: Sequence[object], cotangents: Sequence[Sequence[torch.Tensor | None]]
    ) -> list[torch.Tensor | None]:
        """Cotangents of the flat inputs: concatenated where an input was split, summed where it was passed whole."""
        if self.count == 1:
            return list(cotangents[0])
        out: list[torch.Tensor | None] = []
        for dim, parts in zip(self.dims(inputs), zip(*cotangents, strict=True), strict=True):
            own = [part for part in parts if part is not None]  # all of them or none
            out.append(None if not own else torch.stack(own).sum(0) if dim is None else torch.cat(own, dim))
        return out


def _refuse_rows_inside(leaf: object) -> None:
    """Refuses an object that is no pytree and holds tensors, which every microbatch would be given whole."""
    if any(x.ndim for x in tensors_inside(leaf)):
        instead = "Pass dict(batch)" if isinstance(leaf, Mapping) else "Register it (optree.register_pytree_node)"
        raise TypeError(
            f"accumulate: an input holds a {type(leaf).__name__} of tensors, which is no pytree and would not be "
            f"split; expected tensors in dicts, lists, tuples and NamedTuples. {instead}, or in_dims= with None for "
            "inputs that each microbatch is given whole."
        )


def need_in_dims(in_dims: object, who: str) -> None:
    """Refuses what says no dim to split by: an int or None for all inputs, or a tuple with one of them for each."""
    for dim in in_dims if isinstance(in_dims, tuple) else (in_dims,):
        if dim is not None and (not isinstance(dim, int) or isinstance(dim, bool)):
            raise wrong(who, "in_dims", in_dims, "an int or None, or a tuple with one of them per input")


class Part(NamedTuple):
    """One microbatch's part of an output leaf: its dim 0, and its cotangent's dtype, each None where it has none."""

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
    tensors = [x if isinstance(x, torch.Tensor) else torch.tensor(x, device="cpu").float() for x in parts]
    dtype = _widest([tensor.dtype for tensor in tensors])
    return torch.stack([tensor.to(dtype) for tensor in tensors]).mean(0)


def _widest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype of a mean: float32, or what is wider."""
    return functools.reduce(torch.promote_types, dtypes, torch.float32)


def _is_real(x: object) -> bool:
    """True for a value that is averaged, which as a tensor has a cotangent."""
    if isinstance(x, torch.Tensor):
        return pytree.is_real(x)
    return not isinstance(x, numbers.Integral)


def _merged(name: str, parts: Sequence[object]) -> object:
    """One leaf of all microbatches' outputs."""
    tensors = [x for x in parts if isinstance(x, torch.Tensor)]
    if len(tensors) == len(parts) and all(x.ndim for x in tensors):
        shapes = [tuple(x.shape) for x in tensors]
        if len({shape[1:] for shape in shapes}) > 1:
            raise _refused(name, f"of the shapes {shapes}", "one shape but for dim 0, which is concatenated")
        return torch.cat(tensors)
    if all(isinstance(x, (numbers.Number, torch.Tensor)) and not getattr(x, "ndim", 0) for x in parts):
        if any(_is_real(x) for x in parts):
            return mean_of(parts)
        return torch.stack([torch.as_tensor(x, device=tensors[0].device if tensors else None) for x in parts])
    if tensors or not all(_same(parts[0], x) for x in parts[1:]):
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


def _split(name: str, leaf: object, parts: Sequence[Part], divisor: int) -> Sequence[object]:
    """The cotangents of every microbatch's part of one output leaf."""
    if not isinstance(leaf, torch.Tensor):
        return [leaf] * len(parts)
    dtypes = [part.dtype for part in parts if part.dtype]
    if len(dtypes) < len(parts):
        return [None] * len(parts)
    lengths = [part.length for part in parts if part.length is not None]
    if len(lengths) < len(parts):
        expected = _widest(dtypes)
        if leaf.ndim or leaf.dtype != expected:
            raise ValueError(
                f"cotangent of {name}: got shape {tuple(leaf.shape)} and dtype {leaf.dtype}, expected () and "
                f"{expected}, those of the output, which is the mean over all microbatches. Convert it with .to(...)."
            )
        return [(leaf / divisor).to(dtype) for dtype in dtypes]
    total = sum(lengths)
    if leaf.ndim == 0 or leaf.shape[0] != total:
        raise ValueError(
            f"cotangent of {name}: got shape {tuple(leaf.shape)}, expected a leading dim of {total}, that of the "
            "output over all microbatches."
        )
    return leaf.split(lengths)
