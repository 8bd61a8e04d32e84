"""Inputs of which each rank of a tensor axis has its own slice: what follows values through a function is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fzero.base import pytree
from fzero.components.remote.specs import axes_of, dims_by_leaf
from fzero.table.placements import Cut, Mark, noting


def lies_over(specs: object, axis: str) -> bool:
    """Tells whether some tensor lies over an axis."""
    return any(axis in axes_of(spec.dims) for spec in pytree.leaves(specs))


@dataclass(frozen=True)
class OwnSlices:
    """A function, some of whose inputs lie over the axis that leaves are cut over: they vary, as a column's outputs do.

    Attributes:
        in_specs: of its inputs.
        axis: by name.
    """

    fn: Callable[..., object]
    in_specs: object
    axis: str

    def __call__(self, params: object, *inputs: object) -> object:
        known, leaves = noting(), pytree.flatten(inputs)[0]
        dims = dims_by_leaf(self.in_specs, inputs, "in_specs", "inputs") if known is not None else ()
        for x, own in zip(leaves, dims, strict=False):
            place = next((place for place, names in enumerate(own) if self.axis in names), None)
            if known is not None and place is not None and isinstance(x, torch.Tensor):
                known.note(x, Mark(f"an input over {self.axis!r}", Cut(place - x.ndim, None, known.axis.rank)))
        return self.fn(params, *inputs)
