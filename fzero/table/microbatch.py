"""Splitting inputs and cotangents into microbatches, and putting outputs together again."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fzero.base import private, pytree
from fzero.base.arguments import named, wrong
from fzero.base.follow import nothing_of
from fzero.base.ragged import places_in
from fzero.base.rebound import tensors_inside

LARGEST = 1e300  # weight, of which sums are finite


@dataclass(frozen=True)
class Microbatches:
    """How many, and along which dim every input is split (as in torch.func.vmap; None: not split)."""

    count: int = 1
    in_dims: int | tuple[int | None, ...] | None = 0
    # gives the weight of a microbatch, of its inputs; None weighs by examples within a rank
    weights: Callable[..., object] | None = None

    @property
    def means(self) -> int:
        """How many means are averaged as if all weighed the same; 0 where weights are given."""
        return self.count if self.weights is None else 0

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
        """The inputs of every microbatch, in sizes as equal as can be; of ragged examples each has the rows of its own.

        Raises:
            ValueError: an input has no such dim; they do not divide, and have different sizes there.
        """
        if self.count == 1:
            return [tuple(inputs)]
        names, flat, spec = pytree.named_leaves(tuple(inputs))
        columns: list[Sequence[object]] = []
        dims, ragged = self.dims(inputs), places_in(tuple(inputs))
        sizes: dict[str, int] = {}
        for place, (name, leaf, dim) in enumerate(zip(names, flat, dims, strict=True)):
            dim = None if place in ragged else dim
            if dim is not None:
                if not -leaf.ndim <= dim < leaf.ndim:
                    raise ValueError(
                        f"accumulate: input {name} has shape {tuple(leaf.shape)}, expected a dim {dim} to split into "
                        f"{self.count} microbatches. Pass in_dims= with None for inputs that are not split."
                    )
                sizes[name] = leaf.shape[dim]
            columns.append([leaf] * self.count if dim is None else leaf.split(self.sizes(leaf.shape[dim]), dim))
        if len({*sizes.values()}) > 1 and any(size % self.count for size in sizes.values()):
            raise ValueError(
                f"accumulate: got {', '.join(f'{size} in input {name}' for name, size in sizes.items())} along the "
                f"dims that are split, expected the same number in all, or numbers that divide into {self.count} "
                "microbatches: otherwise rows of one example would be parted. Pass in_dims= with None for inputs that "
                "are not split."
            )
        for place, lengths in ragged.items():
            columns[place] = self._rows(flat[place], columns[lengths], names[place], dims[lengths])
        return [pytree.unflatten(spec, [column[i] for column in columns]) for i in range(self.count)]

    def examples(self, inputs: Sequence[object]) -> list[int] | None:
        """How many examples each microbatch has, by the first input that is split; None where none is."""
        ragged = places_in(tuple(inputs))
        for place, (dim, x) in enumerate(self.leaves(inputs)):
            if dim is None or place in ragged or not isinstance(x, torch.Tensor):
                continue
            if -x.ndim <= dim < x.ndim:
                return self.sizes(x.shape[dim])
        return None

    def sizes(self, total: int) -> list[int]:
        """How many of some examples each microbatch has, as `torch.tensor_split` has it."""
        each, more = divmod(total, self.count)
        return [each + (i < more) for i in range(self.count)]

    def weights_at(self, parts: Sequence[Sequence[object]]) -> list[float]:
        """The weights of microbatches, of their inputs."""
        assert self.weights is not None
        return [_weight(self.weights(*part), i) for i, part in enumerate(parts)]

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

    def merge(self, outputs: Sequence[object], what: str = "outputs", factors: Sequence[float] | None = None) -> Any:
        """The outputs of all microbatches as one.

        Tensors with dims are concatenated along dim 0. 0-d floating ones and Python floats are averaged, in float32 or
        float64; other 0-d ones, Python ints and bools are stacked as [microbatches]. What else there is stays where it
        is the same in all.

        Args:
            factors: by what averaged ones are multiplied, and then added up; None takes the mean.
        """
        if self.count == 1 and factors is None:
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
        merged = [_merged(f"{what} {name}" if name else what, own, factors) for name, *own in columns]
        return pytree.unflatten(spec, merged)

    def parts_like(self, parts: list[Part], sizes: Sequence[int] | None, microbatch: int = 0) -> list[list[Part]]:
        """`parts_of` every microbatch, of `sizes` examples, by those of one, where others have like outputs."""
        if sizes is None:
            return [parts] * self.count
        of = sizes[microbatch]

        def rows(own: int | None, size: int) -> int | None:
            if not own:
                return own if own is None or of else size  # of no examples it does not show how many each has
            return own if not of or own % of else own // of * size

        return [[part._replace(length=rows(part.length, size)) for part in parts] for size in sizes]

    def split_cotangent(
        self, cotangent: object, parts: Sequence[Sequence[Part]], factors: Sequence[float] | None = None
    ) -> tuple[list[object], float]:
        """The transpose of `merge` by `parts_of` every microbatch, and by what to divide what it is pulled back to.

        A loss's share is 1 / count, which 16 bits do not hold for every count: then it is a power of two, and what is
        left is the second value. Where no microbatch counts that is NaN: a mean over nothing.
        """
        if self.count == 1 and factors is None:
            return [cotangent], 1.0
        if factors is not None:
            by, times = factors, math.nan if math.isnan(factors[0]) else 1.0
        else:
            real = [(part.length, part.dtype.itemsize) for part in parts[0] if part.dtype]
            apart = all(length is None for length, _ in real) and any(size == 2 for _, size in real)
            by = 1 << (self.count.bit_length() - 1) if apart else self.count
            times = self.count / by
        names, flat, spec = pytree.named_leaves(cotangent)
        columns = [
            _split(name or "the output", leaf, own, by) for name, leaf, *own in zip(names, flat, *parts, strict=True)
        ]
        return [pytree.unflatten(spec, [column[i] for column in columns]) for i in range(self.count)], times

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


def need_weights(weights: object, who: str) -> None:
    """Refuses weights that are no function."""
    if weights is not None and not callable(weights):
        raise wrong(who, "weights", weights, "a function of a microbatch's inputs, or None")


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


def mean_of(parts: Sequence[object], factors: Sequence[float] | None = None) -> torch.Tensor:
    """The mean of 0-d floating tensors and Python floats, in float32, or in float64 where one of them is.

    Args:
        factors: by what each is multiplied, and then added up, in its place; one of factor 0 may be not finite.
    """
    tensors = [x if isinstance(x, torch.Tensor) else torch.tensor(x, device="cpu").float() for x in parts]
    dtype = _widest([tensor.dtype for tensor in tensors])
    wide = [tensor.to(dtype) for tensor in tensors]
    if factors is None:
        return torch.stack(wide).mean(0) if len(wide) > 1 else wide[0].clone()
    return torch.stack([_times(x, factor, factor) for x, factor in zip(wide, factors, strict=True)]).sum(0)


def _times(x: torch.Tensor, factor: float, otherwise: float) -> torch.Tensor:
    """The product with a factor above 0, else another value: what does not count may be not finite."""
    return x * factor if factor > 0 else nothing_of(x, otherwise)


def _widest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype of a mean: float32, or what is wider."""
    return functools.reduce(torch.promote_types, dtypes, torch.float32)


def _is_real(x: object) -> bool:
    """True for a value that is averaged, which as a tensor has a cotangent."""
    if isinstance(x, torch.Tensor):
        return pytree.is_real(x)
    return not isinstance(x, numbers.Integral)


def _weight(value: object, microbatch: int) -> float:
    """A weight as a number."""
    is_scalar = isinstance(value, torch.Tensor) and not value.ndim and not value.is_complex()
    if not is_scalar and not isinstance(value, numbers.Real):
        got = named(value)
        raise TypeError(f"weights: got {got} for microbatch {microbatch}, expected a real number or a 0-d tensor.")
    if isinstance(value, torch.Tensor):
        if (transform := private.transform_of(value)) is not None:
            raise TypeError(
                f"weights: got a weight of microbatch {microbatch} that {transform} goes through, expected a constant: "
                "no derivative goes through weights. Detach it there, or leave weights= out and take the mean in the "
                "function."
            )
        value = private.unwrapped(value)
    weight = float(value)  # type: ignore[arg-type]
    if not 0.0 <= weight <= LARGEST:
        raise ValueError(
            f"weights: got {weight} for microbatch {microbatch}, expected a finite number of at least 0, and at most "
            f"{LARGEST:g}."
        )
    return weight


def _merged(name: str, parts: Sequence[object], factors: Sequence[float] | None) -> object:
    """One leaf of all microbatches' outputs."""
    if len(parts) == 1 and (getattr(parts[0], "ndim", 0) or not _is_real(parts[0])):
        return parts[0]
    tensors = [x for x in parts if isinstance(x, torch.Tensor)]
    if len(tensors) == len(parts) and all(x.ndim for x in tensors):
        shapes = [tuple(x.shape) for x in tensors]
        if len({shape[1:] for shape in shapes}) > 1:
            raise _refused(name, f"of the shapes {shapes}", "one shape but for dim 0, which is concatenated")
        return torch.cat(tensors)
    if all(isinstance(x, (numbers.Number, torch.Tensor)) and not getattr(x, "ndim", 0) for x in parts):
        if any(_is_real(x) for x in parts):
            return mean_of(parts, factors)
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


def _split(name: str, leaf: object, parts: Sequence[Part], by: int | Sequence[float]) -> Sequence[object]:
    """The cotangents of every microbatch's part of one output leaf.

    Args:
        by: what a scalar's is divided by, or what it is multiplied by in each.
    """
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
        if isinstance(by, int):
            return [(leaf / by).to(dtype) for dtype in dtypes]
        if any(dtype.itemsize == 2 for dtype in dtypes):
            raise ValueError(
                f"accumulate: {name} is a scalar of {dtypes[0]}, and its microbatches count differently; expected one "
                "of float32, as 16 bits do not hold their shares. Return loss.float()."
            )
        shares = [_times(leaf, factor, 0.0) for factor in by]
        return [share.to(dtype) for share, dtype in zip(shares, dtypes, strict=True)]
    total = sum(lengths)
    if leaf.ndim == 0 or leaf.shape[0] != total:
        raise ValueError(
            f"cotangent of {name}: got shape {tuple(leaf.shape)}, expected a leading dim of {total}, that of the "
            "output over all microbatches."
        )
    return leaf.split(lengths)
