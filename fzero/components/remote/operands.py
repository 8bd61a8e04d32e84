"""What a call is given: to each rank its pieces of the batch, as it is sent, and as it arrives there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fzero.base import pytree
from fzero.base.arguments import named, need_norm
from fzero.components.remote.group import Group
from fzero.components.remote.handle import Away, Handle, Value
from fzero.components.remote.layout import Cut, Layout, Totals, cuts_of, even_box, need_lengths, ragged_box
from fzero.components.remote.link import Arguments, Place, Settings
from fzero.components.remote.part import Operands, Pulled
from fzero.components.remote.pull import Leaf, Puller, whole
from fzero.components.remote.specs import Dims
from fzero.components.remote.values import Box, cut_to
from fzero.components.remote.wire import LEAF, Skeleton, Slot, packed, slots_of, unpacked
from fzero.state.beyond import here
from fzero.state.checks import constants


class Given(NamedTuple):
    """Operands."""

    arguments: Arguments  # of the call, on all ranks
    by_rank: Sequence[Arguments]  # further ones of each
    held: list[Away]  # what must lie where it does until all ranks have their operands
    skeleton: Skeleton = LEAF
    shapes: tuple[object, ...] = ()  # of the tensors among the leaves; None of a handle


def is_value(node: object) -> bool:
    return isinstance(node, (torch.Tensor, Value))


def inputs_for(group: Group, inputs: Sequence[object], who: str) -> Given:
    """Inputs: each rank is sent its pieces of tensors, and the names of handles, to bring its pieces of these."""
    _need_plain_surroundings(group.settings, who)
    (inputs,) = constants(who, inputs=tuple(inputs))
    skeleton, leaves = packed(inputs, is_value, f"{who}: inputs")
    places, totals = group.places, Totals(who)
    cuts = cuts_of(skeleton, len(leaves), group.settings.in_specs)
    by_rank: list[list[Leaf]] = [[] for _ in places]
    for number, (x, cut) in enumerate(zip(leaves, cuts, strict=True)):
        lengths = leaves[cut.lengths] if cut.lengths >= 0 else None
        if isinstance(x, Value):
            sent = [_sent(group, x)] * len(places)
        else:
            what = f"{who}: tensor {number} of the inputs"
            dims = cut.dims_of(places[0], x.shape, what)
            totals.need(number, dims if lengths is None else ((), *dims[1:]), x.shape)
            if cut.leads:
                need_lengths(x, what)
            own = _plain(x, who)
            if lengths is None:
                boxes = [None if cut.leads else even_box(dims, x.shape, place) for place in places]
            elif isinstance(lengths, Value):
                boxes = [None] * len(places)  # which each rank cuts once it knows the lengths
            else:
                need_lengths(lengths, what)
                over = cuts[cut.lengths].dims_of(places[0], lengths.shape, what)[0]
                boxes = [ragged_box(dims, over, x.shape, lengths, place, what) for place in places]
            sent = _pieces(own, boxes, group.links[0].local)
        for leaf, rank in zip(sent, by_rank, strict=True):
            rank.append(leaf)
    own_inputs = [{"inputs": (skeleton, own, cuts)} for own in by_rank]
    return Given({}, own_inputs, _held(leaves), skeleton, tuple(map(_shape, leaves)))


def _pieces(x: torch.Tensor, boxes: Sequence[Box | None], local: bool) -> list[Leaf]:
    """The leaves of a tensor for ranks that have these boxes of it.

    Args:
        local: whether the ranks are in this process: each has memory of its own then, too, as the caller may write to
            the tensor, and a function to what it is given.
    """
    out: list[Leaf] = []
    for box in boxes:
        whole = box is None or all(stop - start == size for (start, stop), size in zip(box, x.shape, strict=True))
        part = x if whole else cut_to(x, box)  # type: ignore[arg-type]
        part = _copied(part) if local else part
        out.append(("tensor", part) if box is None else ("slice", part, tuple(x.shape)))
    return out


def _copied(x: torch.Tensor) -> torch.Tensor:
    """The same values in memory of its own, not to be differentiated, also of an inference tensor."""
    with torch.inference_mode(False), torch.no_grad():
        return x.detach().clone()


def cotangent_for(group: Group, cotangent: object, outputs: pytree.Spec) -> Given:
    """A cotangent of outputs of this structure: every rank takes the rows of its own."""
    (cotangent,) = constants("pullback", cotangent=cotangent)
    spec = pytree.flatten(cotangent)[1]
    if spec != outputs:
        raise ValueError(
            f"cotangent: got the structure {spec}, expected that of the outputs, {outputs}. Give one cotangent per "
            "output, in the same containers; None counts as zero."
        )
    skeleton, leaves = packed(cotangent, is_value, "cotangent")
    own = [_sent(group, x) if isinstance(x, Value) else ("tensor", _own(group, x, "pullback")) for x in leaves]
    return Given({"cotangent": (skeleton, own)}, (), _held(leaves))


def norm_for(group: Group, value: object, who: str) -> object:
    """A norm: None, a number, or a 0-d tensor, which is waited for."""
    need_norm(value := here(value), who)
    return _own(group, value, who) if isinstance(value, torch.Tensor) else value


def _own(group: Group, x: torch.Tensor, who: str) -> torch.Tensor:
    """A tensor that nobody else writes to once it is sent."""
    return _copied(_plain(x, who)) if group.links[0].local else _plain(x, who)


def _plain(x: torch.Tensor, who: str) -> torch.Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            f"{who}: got {named(x)} that autograd follows, expected a constant: no graph leads to another component. "
            "Pass x.detach(), and pull cotangents back with the pullback that vjp returns."
        )
    return x.detach()


def _sent(group: Group, value: Value) -> Leaf:
    for away in value.held():
        away.component.group.need_alive()
        group.know(away.component.group)
    return value.leaf()


def _held(leaves: Sequence[object]) -> list[Away]:
    return [away for x in leaves if isinstance(x, Value) for away in x.held()]


def _shape(x: object) -> object:
    return (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else type(x) is Handle


def _need_plain_surroundings(settings: Settings, who: str) -> None:
    """Refuses what a rank does not see, and the same function in this process would."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            raise ValueError(
                f"{who}: got a call of component {settings.component!r} inside torch.autocast({device!r}), expected "
                "one outside: it holds for this thread alone, and the function runs on others. Let build return "
                "fz.autocast(step, dtype), or open torch.autocast in the function."
            )
    if torch.get_default_dtype() != settings.dtype:
        raise ValueError(
            f"{who}: got a call of component {settings.component!r} with the default dtype "
            f"{torch.get_default_dtype()}, expected {settings.dtype}, that of its start, which its ranks have. Call "
            "torch.set_default_dtype before fz.remote, or say dtype= where the function makes tensors."
        )


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
    """This rank's part of a cotangent: the blocks of its own outputs, and its share of a mean."""
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
