"""Which piece of each input is a rank's: equal pieces of dims, and of ragged examples the rows of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fzero.base import pytree
from fzero.base.ragged import places_in
from fzero.components.remote.layout import share
from fzero.components.remote.link import Place
from fzero.components.remote.specs import Dims, dims_by_leaf, need_dims
from fzero.components.remote.values import Box
from fzero.components.remote.wire import Skeleton, Slot, slots_of


class Cut(NamedTuple):
    """How one tensor of the inputs is cut.

    Attributes:
        dims: for each dim the axes that it lies over; None where examples do in dim 0, of what has one.
        lengths: the number of the tensor of lengths whose examples the rows are of; -1 of what is not ragged.
        leads: whether it is such a tensor of lengths, which every rank is given whole.
    """

    dims: Dims | None = None
    lengths: int = -1
    leads: bool = False

    def dims_of(self, place: Place, shape: Sequence[int], what: str) -> Dims:
        """The dims of a tensor of this shape."""
        own = ((place.batch,) if len(shape) else ()) if self.dims is None else self.dims
        return need_dims(own, shape, what)


def cuts_of(skeleton: Skeleton, count: int, in_specs: object) -> list[Cut]:
    """How each tensor of the inputs is cut, by the order of the leaves."""
    tree = slots_of(skeleton)
    cuts = [Cut()] * count
    if in_specs is not None:
        found = zip(pytree.flatten(tree)[0], dims_by_leaf(in_specs, tree, "in_specs", "inputs"), strict=True)
        for slot, dims in found:
            if isinstance(slot, Slot):
                cuts[slot.number] = Cut(dims)
    slots = pytree.flatten(tree)[0]
    for values, lengths in [(slots[one], slots[other]) for one, other in places_in(tree).items()]:
        if isinstance(values, Slot) and isinstance(lengths, Slot):
            cuts[values.number] = cuts[values.number]._replace(lengths=lengths.number)
            cuts[lengths.number] = cuts[lengths.number]._replace(leads=True)
    return cuts


def even_box(dims: Dims, shape: Sequence[int], place: Place) -> Box | None:
    """The piece of a rank; None of what it has whole."""
    if not any(dims):
        return None
    return tuple([share(size, *place.piece(names)) for size, names in zip(shape, dims, strict=True)])


def ragged_box(
    dims: Dims, over: tuple[str, ...], shape: Sequence[int], lengths: torch.Tensor, place: Place, what: str
) -> Box:
    """The rows of a rank's own examples; over further axes equal pieces of these.

    Args:
        over: the axes that the examples lie over.
        lengths: of all examples.
    """
    if not dims or dims[0][: len(over)] != over:
        raise ValueError(
            f"{what} has rows that lie over {dims[0] if dims else ()}, and the lengths of their examples lie over "
            f"{over}; expected the same axes first, as the rows of an example go where its length goes: "
            "fz.Ragged(values=PartitionSpec(('dp', 'sp')), lengths=PartitionSpec('dp'))."
        )
    sizes = lengths.tolist()
    if sum(sizes) != shape[0] or min(sizes, default=0) < 0:
        raise ValueError(
            f"{what} has shape {tuple(shape)} and examples of lengths {sizes}, which add up to {sum(sizes)}; expected "
            "lengths of at least 0 that add up to the number of rows."
        )
    first, last = share(len(sizes), *place.piece(over))
    start, rows = sum(sizes[:first]), sum(sizes[first:last])
    low, high = share(rows, *place.piece(dims[0][len(over) :]))
    others = even_box(dims[1:], shape[1:], place) or tuple([(0, size) for size in shape[1:]])
    return ((start + low, start + high), *others)


def need_lengths(lengths: torch.Tensor, what: str) -> None:
    """Refuses what cannot be the lengths of examples."""
    if lengths.ndim != 1 or lengths.dtype.is_floating_point or lengths.dtype.is_complex or lengths.dtype == torch.bool:
        raise ValueError(
            f"{what} are the lengths of ragged examples, of shape {tuple(lengths.shape)} and dtype {lengths.dtype}; "
            "expected ints, one for each example."
        )


class Totals:
    """The sizes of what lies over the same axes, which must be the same in all inputs."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._found: dict[tuple[str, ...], tuple[int, int, Sequence[int]]] = {}

    def need(self, number: int, dims: Dims, shape: Sequence[int]) -> None:
        """Refuses a tensor of another size than an earlier one.

        Args:
            number: of the tensor.
        """
        for dim, names in enumerate(dims):
            other, place, like = self._found.setdefault(names, (number, dim, shape)) if names else (number, dim, shape)
            if shape[dim] != like[place]:
                raise ValueError(
                    f"{self._who}: dim {place} of tensor {other} of the inputs, of shape {tuple(like)}, and dim {dim} "
                    f"of tensor {number}, of shape {tuple(shape)}, both lie over {' and '.join(map(repr, names))}; "
                    "expected the same size. What belongs to no example must be 0-d, whole by in_specs, or built into "
                    "the function; rows of examples of different lengths are fz.Ragged(values, lengths)."
                )

    def shares(self, place: Place) -> dict[tuple[str, ...], tuple[int, int]]:
        """By axes how much of a dim that lies over them a rank has, and of how much.

        Raises:
            ValueError: some data ranks would have nothing: they compute NaN where fn takes a mean.
        """
        out = {}
        for names, (number, dim, shape) in self._found.items():
            rank, ranks = place.piece(names)
            if 0 < shape[dim] < ranks and {*names} & {*place.averaged}:
                raise ValueError(
                    f"{self._who}: tensor {number} of the inputs has shape {tuple(shape)}, and its dim {dim} is split "
                    f"over {ranks} data ranks; expected a size of at least {ranks}. Give larger batches, or fewer "
                    "ranks."
                )
            start, stop = share(shape[dim], rank, ranks)
            out[names] = stop - start, shape[dim]
        return out
