"""What arrives of a call's inputs and cotangents on one rank: the pieces that are its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero.base import pytree
from fzero.components.remote.layout import Cut, Layout, Totals, even_box, need_lengths, ragged_box
from fzero.components.remote.link import Place
from fzero.components.remote.part import Operands, Pulled
from fzero.components.remote.pull import Leaf, Puller, whole
from fzero.components.remote.specs import Dims
from fzero.components.remote.values import Box, cut_to
from fzero.components.remote.wire import Skeleton, Slot, slots_of, unpacked


def bring_inputs(
    out: Operands,
    given: tuple[Skeleton, Sequence[Leaf], Sequence[Cut]],
    place: Place,
    puller: Puller,
    who: str,
) -> None:
    """Brings the inputs of a call, and notes how they lie."""
    skeleton, leaves, cuts = given
    shapes: dict[int, tuple[int, ...]] = {
        number: leaf[2] if leaf[0] == "slice" else tuple(leaf[1].shape)
        for number, leaf in enumerate(leaves)
        if leaf[0] in ("slice", "tensor")
    }
    tensors: dict[int, Any] = {}

    def dims_of(number: int) -> Dims:
        return cuts[number].dims_of(place, shapes[number], f"{who}: tensor {number} of the inputs")

    def box_of(number: int) -> Box | None:
        cut = cuts[number]
        if cut.leads:
            return None
        if cut.lengths < 0:
            return even_box(dims_of(number), shapes[number], place)
        over = dims_of(cut.lengths)[0]
        what = f"{who}: tensor {number} of the inputs"
        return ragged_box(dims_of(number), over, shapes[number], tensors[cut.lengths], place, what)

    def asked(number: int) -> Callable[[Layout], Box | None]:
        def box(layout: Layout) -> Box | None:
            shapes.setdefault(number, layout.shape)
            return box_of(number)

        return box

    for ragged in (False, True):  # rows are asked for once the lengths are known
        numbers = [number for number, cut in enumerate(cuts) if (cut.lengths >= 0) == ragged]
        wanted = [(leaves[number], asked(number)) for number in numbers]
        found = puller.pulled(wanted) if wanted else []
        tensors.update(zip(numbers, found, strict=True))
        for number in numbers:
            if cuts[number].leads:
                need_lengths(tensors[number], f"{who}: tensor {number} of the inputs")
    totals = Totals(who)
    for number, (leaf, cut) in enumerate(zip(leaves, cuts, strict=True)):
        dims = dims_of(number)
        totals.need(number, dims if cut.lengths < 0 else ((), *dims[1:]), shapes[number])
        if cut.leads or (leaf[0] == "tensor" and cut.lengths >= 0):
            box = even_box(dims, shapes[number], place) if cut.leads else box_of(number)
            tensors[number] = tensors[number] if box is None else cut_to(tensors[number], box)
    out.inputs = unpacked(skeleton, [tensors[number] for number in range(len(leaves))])
    out.skeleton, out.dims = skeleton, [dims_of(number) for number in range(len(leaves))]
    out.shares = totals.shares(place)


def brought_cotangent(
    pulled: Pulled, skeleton: Skeleton, leaves: Sequence[Leaf], place: Place, puller: Puller, identity: str
) -> object:
    """This rank's part of a cotangent: the blocks of its own outputs, and its share of a mean.

    Args:
        identity: of the component.
    """
    flat, spec = pytree.flatten(slots_of(skeleton))
    numbers = [number for number, leaf in enumerate(flat) if isinstance(leaf, Slot)]
    missing = [number for number in numbers if pulled.names[number] is not None and number not in pulled.layouts]
    if missing:
        names = [name for number in missing if (name := pulled.names[number]) is not None]
        pulled.layouts.update(zip(missing, puller.layouts(identity, names), strict=True))
    wanted = []
    for number in numbers:
        expected = pulled.layouts.get(number)
        leaf = leaves[int(flat[number].number)]
        wanted.append((_own_block(leaf, expected, place, number), _asked(expected, place, number)))
    for number, tensor in zip(numbers, puller.pulled(wanted), strict=True):
        factor = pulled.factors[number]
        flat[number] = tensor if factor == 1.0 else tensor * factor
    return pytree.unflatten(spec, flat)


def _asked(expected: Layout | None, place: Place, number: int) -> Callable[[Layout], Box | None]:
    """Which block of a cotangent is this rank's."""
    if expected is None or expected.kind != "block":
        return whole

    def box(layout: Layout) -> Box | None:
        _need_shape(layout.shape, expected, number)
        return expected.box(place)

    return box


def _own_block(leaf: Leaf, expected: Layout | None, place: Place, number: int) -> Leaf:
    """A leaf that is a whole tensor of the caller's, cut to this rank's block."""
    if leaf[0] != "tensor" or expected is None or expected.kind != "block":
        return leaf
    _need_shape(tuple(leaf[1].shape), expected, number)
    box, tensor = expected.box(place), leaf[1]
    assert isinstance(tensor, torch.Tensor)
    return leaf if box is None else ("tensor", cut_to(tensor, box))


def _need_shape(got: Sequence[int], expected: Layout, number: int) -> None:
    if tuple(got) != expected.shape:
        raise ValueError(
            f"cotangent of output {number}: got shape {tuple(got)}, expected {expected.shape}, that of the output over "
            "all ranks. Give the cotangent of this forward's own output."
        )
