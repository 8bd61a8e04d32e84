"""What a call is given, as it is sent: a batch's rows to each data rank, handles as the names of values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fzero.base import pytree
from fzero.base.arguments import named
from fzero.components.remote.group import Group
from fzero.components.remote.handle import Away, Handle, Value
from fzero.components.remote.layout import share
from fzero.components.remote.pull import Leaf
from fzero.components.remote.values import version_of
from fzero.components.remote.wire import Skeleton, packed
from fzero.state.checks import constants


class Given(NamedTuple):
    """Operands.

    Attributes:
        by_rank: the leaves for each data rank.
        shapes: of the tensors among the leaves; None of a handle.
        held: what must lie where it does until all ranks have their operands.
    """

    skeleton: Skeleton
    by_rank: list[list[Leaf]]
    shapes: tuple[object, ...]
    held: list[Away]


def is_value(node: object) -> bool:
    return isinstance(node, (torch.Tensor, Value))


def inputs_for(group: Group, inputs: Sequence[object], who: str) -> Given:
    """Inputs: tensors are split along dim 0 over data ranks; those without dims go to all."""
    (inputs,) = constants(who, inputs=tuple(inputs))
    skeleton, leaves = packed(inputs, is_value, f"{who}: inputs")
    size = group.places[0].data_size
    totals = {place: x.shape[0] for place, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.ndim}
    if len(set(totals.values())) > 1:
        shapes = ", ".join(f"tensor {place} {tuple(leaves[place].shape)}" for place in totals)
        raise ValueError(
            f"{who}: the inputs are split along dim 0 over the data ranks of component {group.settings.component!r}, "
            f"and have different ones: {shapes}; expected the same dim 0 for all. What belongs to no example must be "
            "0-d, or built into the function."
        )
    by_rank: list[list[Leaf]] = []
    for rank in range(size):
        own: list[Leaf] = []
        for x in leaves:
            if isinstance(x, Value):
                own.append(_sent(group, x))
            elif x.ndim:
                start, stop = share(x.shape[0], rank, size)
                part = _plain(x, who)[start:stop] if size > 1 else _plain(x, who)
                own.append(("slice", part, x.shape[0], version_of(part)))
            else:
                own.append(("tensor", _plain(x, who), 0, version_of(x)))
        by_rank.append(own)
    return Given(skeleton, by_rank, tuple(map(_shape, leaves)), _held(leaves))


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
    own = [_sent(group, x) if isinstance(x, Value) else ("tensor", _plain(x, "pullback")) for x in leaves]
    return Given(skeleton, [own], tuple(map(_shape, leaves)), _held(leaves))


def scalar_for(group: Group, value: object, who: str, argument: str) -> tuple[Leaf, list[Away]]:
    """A number, a 0-d tensor or a handle of one."""
    if isinstance(value, Value):
        return _sent(group, value), _held([value])
    if isinstance(value, torch.Tensor):
        return ("tensor", _plain(value, who)), []
    return ("constant", value), []


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
