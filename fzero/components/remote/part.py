"""What a rank computes with, and what its share of inputs and outputs is in those of the whole batch.

A pullback gives the mean over the n ranks that the step takes means over, of which c may have the same piece. The
cotangent of a piece is therefore taken times 1 / c, one of a mean times the rank's weight, the cotangents of inputs are
the sums over the c, and grads are n times what the pullback gives: so nothing on the way is larger than in one process.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fzero.base import pytree
from fzero.components.remote.layout import Layout
from fzero.components.remote.link import Place
from fzero.components.remote.specs import Dims, axes_of, dims_by_leaf, need_dims
from fzero.components.remote.values import Name, Piece, digest_of
from fzero.components.remote.wire import LEAF, Packed, Skeleton, Slot, slots_of
from fzero.state.sharded import Sharded

KEPT = 4096  # calls whose times a rank remembers until somebody asks


@dataclass
class Operands:
    """What a call works on, on one rank."""

    call: int  # its number
    objects: dict[str, Any]  # states, grads and pullbacks, by what they are for
    options: dict[str, Any]
    inputs: tuple[object, ...] = ()
    skeleton: Skeleton = LEAF
    # of the tensors of the inputs in order, the axes that each dim lies over
    dims: list[Dims] = field(default_factory=list)
    # by axes that a dim of inputs lies over, how much of it this rank has, and of how much
    shares: dict[tuple[str, ...], tuple[int, int]] = field(default_factory=dict)
    cotangent: object = None


@dataclass
class Pulled:
    """A pullback on one rank, and what cotangents of the whole outputs become for it."""

    pullback: Any
    spec: pytree.Spec  # of the outputs
    # names, factors: of their leaves, by place; no tensor has no name
    names: list[Name | None]
    factors: list[float]
    places: list[list[int | None]]  # of the flat inputs, the numbers of the tensors among them
    dims: list[Dims]  # of these, the axes that each dim lies over
    # of the outputs over all ranks, as far as they were asked for
    layouts: dict[int, Layout] = field(default_factory=dict)


@dataclass
class Part:
    """What `build` gave a rank, and its place in its component."""

    step: Any
    params: object
    place: Place
    ranks: int
    out_specs: object = None
    _spans: collections.deque[tuple[object, ...]] = field(default_factory=lambda: collections.deque(maxlen=KEPT))

    def ran(self, verb: str, options: Mapping[str, Any], begun: float) -> None:
        """Notes that a call was run, from a time until now."""
        self._spans.append((verb, options.get("microbatch", -1), options.get("halves", ""), begun, time.monotonic()))

    def spans(self) -> list[tuple[object, ...]]:
        """What was noted since it was last asked for: verb, microbatch, half, start and end of each call."""
        found = [*self._spans]
        self._spans.clear()
        return found

    def weight(self, shares: Mapping[tuple[str, ...], tuple[int, int]]) -> float:
        """This rank's weight in the mean of what each rank has a scalar of: its share of what the inputs are cut to."""
        place = self.place
        if self.step.microbatches.weights is not None:  # which is in what the rank has
            return 1 / place.means
        shares = {own: share for own, share in shares.items() if {*own} & {*place.averaged}}  # others have it alike
        names = [name for own in shares for name in own]
        if all(total % place.piece(own)[1] == 0 for own, (_, total) in shares.items()):
            return 1 / place.means
        if len({*names}) < len(names) or not {*names} <= {*place.averaged}:
            raise ValueError(
                "fz.remote: the function returned a scalar, which is averaged by how much of the inputs each rank has, "
                f"and they are cut over axes that overlap into pieces of unequal sizes: {list(shares)}. Give equal "
                "pieces, or return the scalar as sum and count, with a dim: x[None]."
            )
        by_axes = [own / total if total else 1 / place.piece(axes)[1] for axes, (own, total) in shares.items()]
        return math.prod(by_axes) / place.copies(names)

    def need_microbatches(self, operands: Operands) -> None:
        """Refuses on all ranks what some could not split into the step's microbatches, for whom others would wait."""
        micro, sizes, uneven = self.step.microbatches, set[int](), False
        if micro.count == 1:
            return
        slots = pytree.flatten(slots_of(operands.skeleton))[0]
        for slot, dim in zip(slots, micro.dims(operands.inputs), strict=True):
            if not isinstance(slot, Slot) or dim is None:
                continue
            dims = operands.dims[slot.number]
            if not -len(dims) <= dim < len(dims):
                raise ValueError(
                    f"accumulate: tensor {slot.number} of the inputs has {len(dims)} dims, and no dim {dim} that could "
                    f"be split into {micro.count} microbatches. Pass in_dims= with None for inputs that are not split."
                )
            total, count = operands.shares.get(dims[dim], (0, 0))[1], self.place.piece(dims[dim])[1]
            sizes.add(total)
            uneven |= total % (count * micro.count) > 0
            if uneven and len(sizes) > 1:
                raise ValueError(
                    f"accumulate: got inputs of sizes {sorted(sizes)} along the dims that are split into {micro.count} "
                    f"microbatches, which some of {count} ranks could not divide; expected the same size in all, or "
                    f"sizes that {count * micro.count} divides."
                )

    def pieces(self, number: int, tree: Packed, operands: Operands) -> list[Piece]:
        """The pieces that this rank has of the tensors in what the function returned.

        Args:
            number: of the tree: 0 is that of the outputs, further ones are aux.
        """
        what = f"aux {number}" if number else "outputs"
        if self.out_specs is None:
            if self.place.batch in operands.shares and self.place.piece(self.place.batch)[1] > 1:
                _need_no_numbers(tree, operands.inputs, what)
            return [self._piece(x, None, operands, what) for x in tree.leaves]
        specs, whole = self.out_specs, slots_of(tree.skeleton)
        if self.step.has_aux and isinstance(specs, tuple):
            if number >= len(specs):
                raise ValueError(
                    f"fz.remote: got out_specs={specs}, expected specs of all that the function returns, aux, too."
                )
            specs = specs[number]
        found = zip(pytree.flatten(whole)[0], dims_by_leaf(specs, whole, "out_specs", what), strict=True)
        dims = {slot.number: own for slot, own in found if isinstance(slot, Slot)}
        return [self._piece(x, dims[i], operands, what) for i, x in enumerate(tree.leaves)]

    def _piece(self, tensor: torch.Tensor, dims: Dims | None, operands: Operands, what: str) -> Piece:
        tensor = tensor.detach()
        if dims is not None:
            dims = need_dims(dims, tensor.shape, f"fz.remote: a tensor of the {what}")
        if not tensor.ndim and pytree.is_real(tensor):
            names = dict.fromkeys([name for own in operands.shares for name in own])
            axes = tuple([name for name in names if name in self.place.averaged])
            return self.digested(Piece("mean", tensor, (axes,), self.weight(operands.shares)))
        if dims is None:
            dims = need_dims((self.place.batch,) if tensor.ndim and operands.shares else (), tensor.shape, what)
        return self.digested(Piece("block", tensor, dims))

    def factor(self, piece: Piece) -> float:
        """By what a cotangent of an output is multiplied."""
        if piece.kind == "mean":
            return piece.weight
        return 1.0 / self.place.copies(axes_of(piece.dims))

    def digested(self, piece: Piece) -> Piece:
        """A piece with its digest, where other ranks should have the same tensor."""
        like = self.place.piece(axes_of(piece.dims))[1] if piece.kind == "block" else self.place.means
        return piece._replace(digest=digest_of(piece.tensor)) if like < self.ranks else piece

    def input_piece(self, cotangent: torch.Tensor, dims: Dims) -> Piece:
        """The piece that this rank has of an input's cotangent."""
        kind = "added" if self.place.copies(axes_of(dims)) > 1 else "block"
        return self.digested(Piece(kind, cotangent, dims))

    def grads(self, grads: Sharded) -> Sharded:
        """The grads of the whole batch, of those that a pullback gave."""
        means = self.place.means
        return grads if means == 1 else grads.replaced(scale=grads.scale / means)


def _need_no_numbers(tree: Packed, inputs: object, what: str) -> None:
    """Refuses integers without dims, and Python's numbers: nobody can tell whether they count a rank's examples.

    Those of another value on another rank would be seen, but not a count of 2 on each of two. Bools are compared, and
    those that all ranks have are the whole batch's.

    Args:
        inputs: of the function, whose 0-d tensors it may hand on.
        what: the tree is, in words.
    """
    found = [x for x in pytree.flatten(slots_of(tree.skeleton))[0] if type(x) in (int, float, torch.Size)]
    known = {x.data_ptr() for x in pytree.flatten(inputs)[0] if isinstance(x, torch.Tensor) and not x.ndim}
    for x in tree.leaves:
        if not x.ndim and not pytree.is_real(x) and x.dtype != torch.bool and x.data_ptr() not in known:
            found.append(x)
    if found:
        raise ValueError(
            f"fz.remote: {what} have {found[0]!r}, a number without dims that is not averaged over the data ranks, "
            "each of which has its share of the batch: it may be a count of the share, which is another one for the "
            "whole batch. Return counts and sizes by example, with a dim (x > 0, not (x > 0).sum()), means as floating "
            "tensors, and numbers of the caller's as 0-d tensors that fn is given and hands on; or say by in_specs= "
            "and out_specs= what is whole on every rank."
        )
