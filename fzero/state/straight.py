"""Straight-through states: float32 values in the place of codes, which are those that the codes would be of.

The derivative of the rounding counts as one (Bengio et al. 2013, 1308.3432), so that what goes through whole steps is
that of a run in float32 at the values of the one in few bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fzero.base.context import jitting
from fzero.formats.bits import Counters
from fzero.formats.formats import Companded, Format, decode, encode
from fzero.formats.ops import Ops
from fzero.kernels.onepass import rounded
from fzero.state.sharded import Draw, Sharded
from fzero.table.layout import Key
from fzero.table.policy import Policy

_MEMBERS = 1_000_003  # by which a seed is multiplied for one of each member's own


class _Map(Protocol):
    """What torch.func.vmap says of itself."""

    batch_size: int
    randomness: str


@dataclass(frozen=True)
class _Rounding:
    """What some values of a group become in their formats, with the random bits of one update; to nearest by None."""

    formats: Sequence[Format]
    tree: Sharded
    key: Key
    draw: Draw | None

    @property
    def draws(self) -> bool:
        return self.draw is not None and any(form.rounds for form in self.formats)

    def __call__(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        counters = None
        if self.draw is not None and self.draws and isinstance(self.draw.count, torch.Tensor):
            return tuple(jitting.get().effects.of_count(self._at, self.draw.count, values, values))
        if self.draw is not None:
            rank = self.tree.rank_of(self.key)
            counters = self.draw.counters(self.tree.layout, self.key, rank) if self.draws else Counters()
        return tuple(rounded(self.formats, values, counters))

    def _at(self, count: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """In a run of a graph, which knows how many updates the state has had."""
        assert self.draw is not None
        return dataclasses.replace(self, draw=dataclasses.replace(self.draw, count=count))(*values)

    def of_member(self, number: int, randomness: str) -> _Rounding:
        """The same for one member of a map: with random bits of its own where the map says so."""
        if not self.draws or randomness == "same":
            return self
        if randomness == "error":
            raise RuntimeError(
                "torch.func.vmap: got a map with randomness='error' of a step that rounds stochastically; expected "
                "randomness='same', with which all members round alike, or 'different'."
            )
        assert self.draw is not None
        own = dataclasses.replace(self.draw, seed=self.draw.seed * _MEMBERS + number + 1)
        return dataclasses.replace(self, draw=own)


@dataclass(frozen=True)
class _Used:
    """The values of params as they are computed with."""

    policy: Policy
    coded: bool  # whether they stand for codes

    def __call__(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        policy = self.policy
        used = policy.used(encode(policy.param_format, values)) if self.coded else policy.gathered(values)
        return (used.to(values.dtype),)

    def of_member(self, number: int, randomness: str) -> _Used:
        return self


class _Straight(torch.autograd.Function):
    """`apply(fn, *values)`: what a function makes of values, at any functorch level, with the derivative one."""

    @staticmethod
    def forward(fn: _Rounding | _Used, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return fn(*values)

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: object, *cotangents: torch.Tensor) -> object:  # type: ignore[override]
        return None, *cotangents

    @staticmethod
    def jvp(ctx: object, _: object, *tangents: torch.Tensor) -> object:  # type: ignore[override]
        return tuple(tangent.view_as(tangent) for tangent in tangents)

    @staticmethod
    def vmap(  # type: ignore[override]
        info: _Map, in_dims: Sequence[int | None], fn: _Rounding | _Used, *values: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
        found = []
        for number in range(info.batch_size):
            pairs = zip(values, in_dims[1:], strict=True)
            own = [x if dim is None else x.select(dim, number) for x, dim in pairs]
            found.append(_Straight.apply(fn.of_member(number, info.randomness), *own))
        return tuple(torch.stack(each) for each in zip(*found, strict=True)), (0,) * len(values)


def as_stored(
    trees: Sequence[Sharded], key: Key, values: Sequence[torch.Tensor], draw: Draw | None
) -> list[torch.Tensor]:
    """The values of a group that several trees would have stored, as differentiable functions of what is stored.

    Args:
        trees: params and moments, whose policy is straight-through.
        values: of this rank's slices, in float32.
        draw: what an update rounds with; None rounds to nearest.
    """
    formats = [tree.coded_as(key)[0] for tree in trees]
    return list(_Straight.apply(_Rounding(formats, trees[0], key, draw), *values))


def as_used(policy: Policy, values: torch.Tensor, coded: bool = True) -> torch.Tensor:
    """The values that params are computed with, where their policy is straight-through; else these.

    Args:
        coded: whether they stand for codes, and are not an average, say, that is used in the params' place.
    """
    if policy.straight_through and (policy.gather is not None or (coded and policy.param_format.upper is not None)):
        return _Straight.apply(_Used(policy, coded), values)[0]
    return values


@dataclass(frozen=True)
class _OtherScale(Companded):
    """The same codes with another power of two than the least one as their group's scale."""

    by: int = 0

    def scale(self, o: Ops, largest: torch.Tensor) -> torch.Tensor:
        return (super().scale(o, largest) + self.by).clamp(0, 253)


def codes_of(form: Format, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The parts of float32 values that a format has decoded, to the bit; the nearest to others.

    Rounding may leave a group without the large value that its scale was for, so that the least scale for its values,
    or the next smaller one, does not have codes for all of them.
    """
    parts = encode(form, values)
    if not isinstance(form, Companded):
        return parts
    for by in (1, -1):
        other = encode(_OtherScale(form.signed, form.width, by), values)
        there = decode(form, other, values.dtype).view(torch.int32) == values.view(torch.int32)
        there = there.view(-1, form.group).all(1, keepdim=True)
        pairs = [(x.view(len(there), -1), y.view(len(there), -1)) for x, y in zip(other, parts, strict=True)]
        parts = tuple(torch.where(there, x, y).view(-1) for x, y in pairs)
    return parts


def as_seen(tree: Sharded) -> Sharded:
    """Params with values in the dtype in which those who are given codes see them."""
    forms = {key: tree.coded_as(key)[0] for key in tree.groups if tree.holds_values(key)}
    own = {key: tree.entries[key] for key, form in forms.items() if form.plain}
    seen = {key: x.to(forms[key].dtype) for key, x in own.items() if isinstance(x, torch.Tensor)}
    return tree.replaced(buffers=tree.entries | seen) if seen else tree
