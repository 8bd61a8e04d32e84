"""Collectives as differentiable linear maps, each with its transpose, at any functorch level."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from fzero.base import private
from fzero.base.node import final
from fzero.comm.axis import Axis

_Map = Callable[[torch.Tensor], torch.Tensor]


class _Linear(torch.autograd.Function):
    """`apply(fn, transpose, tensor)`: a linear map that any functorch level may transform.

    It knows dims by their numbers from the front: what is mapped over comes behind them.
    """

    @staticmethod
    def forward(fn: _Map, transpose: _Map, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return fn(tensor)

    @staticmethod
    def setup_context(ctx: private.Context, inputs: Sequence[object], output: object) -> None:
        ctx.fn, ctx.transpose, _ = inputs

    @staticmethod
    def backward(ctx: private.Context, cotangent: torch.Tensor) -> object:  # type: ignore[override]
        if final():
            return None, None, ctx.transpose(private.unwrapped(cotangent))
        return None, None, _Linear.apply(ctx.transpose, ctx.fn, cotangent)

    @staticmethod
    def jvp(ctx: private.Context, _: object, __: object, tangent: torch.Tensor) -> object:  # type: ignore[override]
        return _Linear.apply(ctx.fn, ctx.transpose, tangent)

    @staticmethod
    def vmap(  # type: ignore[override]
        info: object, in_dims: Sequence[int], fn: _Map, transpose: _Map, tensor: torch.Tensor
    ) -> tuple[object, int]:
        return _Linear.apply(fn, transpose, tensor.movedim(in_dims[2], -1).contiguous()), -1


def quick(function: type[torch.autograd.Function]) -> Callable[..., torch.Tensor]:
    """`apply` of a Function, quick where no transform is active; what stands for a tensor says itself what it is."""
    direct = private.direct(function)

    def apply(*operands: object) -> torch.Tensor:
        if any(isinstance(x, torch.Tensor) and type(x) not in _PLAIN for x in operands):
            if private.transforms():
                return function.apply(*operands)
            operands = tuple([x.view_as(x) if isinstance(x, torch.Tensor) else x for x in operands])
        return direct(*operands)

    return apply


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_linear = quick(_Linear)


def linear(fn: _Map, transpose: _Map, tensor: torch.Tensor) -> torch.Tensor:
    """A linear map as a differentiable function of a tensor."""
    return _linear(fn, transpose, tensor)


@dataclass(eq=False, slots=True)
class Wire:
    """How one buffer travels between ranks. Opaque to pytrees."""

    tag: Hashable
    axis: Axis
    compute: torch.dtype  # dtype of the full buffer
    reduce: torch.dtype  # dtype in which its cotangents are summed
    wire: torch.dtype  # dtype in which a full cotangent travels

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        return self.axis.gather(shard.to(self.compute), self.tag)

    def reduce_scatter(self, full: torch.Tensor) -> torch.Tensor:
        return self.axis.reduce_scatter(full.to(self.wire), self.tag, self.reduce)

    def spread(self, shard: torch.Tensor) -> torch.Tensor:
        """The full buffer as a differentiable function of this shard."""
        return _Linear.apply(self.gather, self.reduce_scatter, shard)

    def collect(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the mean of full buffers, as a differentiable function of this one."""
        return _Linear.apply(self.reduce_scatter, self.gather, full)


class _Followed(torch.autograd.Function):
    """`apply(back, tensor)`: the identity, whose transpose is `back`, a differentiable function itself."""

    @staticmethod
    def forward(back: _Map, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return tensor.clone()

    @staticmethod
    def setup_context(ctx: private.Context, inputs: Sequence[object], output: object) -> None:
        ctx.back = inputs[0]

    @staticmethod
    def backward(ctx: private.Context, cotangent: torch.Tensor) -> object:  # type: ignore[override]
        return None, ctx.back(cotangent)

    @staticmethod
    def jvp(ctx: private.Context, _: object, tangent: torch.Tensor) -> object:  # type: ignore[override]
        return _Followed.apply(ctx.back, tangent)

    @staticmethod
    def vmap(info: object, in_dims: Sequence[int], back: _Map, tensor: torch.Tensor) -> tuple[object, int]:  # type: ignore[override]
        return _Followed.apply(back, tensor.movedim(in_dims[1], -1)), -1


def passed(back: _Map, value: torch.Tensor) -> torch.Tensor:
    """A value whose cotangents go through `back`, a differentiable function."""
    return _Followed.apply(back, value)


def meaned(axis: Axis, local: torch.Tensor) -> torch.Tensor:
    """The mean over the ranks that hold different data, as a differentiable function of this rank's value."""
    if axis.ranks == 1:
        return local
    mean = functools.partial(axis.mean, tag="a mean over ranks")
    return _Linear.apply(mean, mean, local)


def in_shards(axis: Axis, value: torch.Tensor) -> torch.Tensor:
    """What all ranks have alike, for a computation with shards: its cotangents there are summed over them."""
    return _Followed.apply(functools.partial(summed, axis), value) if axis.size > 1 else value


def in_pieces(axis: Axis, value: torch.Tensor) -> torch.Tensor:
    """The same for a computation with the pieces that ranks of a tensor axis hold of leaves."""
    return _Followed.apply(functools.partial(summed_pieces, axis), value) if axis.size > 1 else value


def on_data(axis: Axis, value: torch.Tensor) -> torch.Tensor:
    """What all ranks have alike, for a computation with each rank's own data: its cotangents are those of the mean."""
    return _Followed.apply(functools.partial(meaned, axis), value) if axis.ranks > 1 else value


def summed(axis: Axis, part: torch.Tensor) -> torch.Tensor:
    """The sum over shards, replicated, as a differentiable function of this rank's part."""
    total, mean = (functools.partial(each, tag="global_norm") for each in (axis.sum, axis.mean))
    return _Linear.apply(total, mean, part)


def summed_pieces(axis: Axis, part: torch.Tensor) -> torch.Tensor:
    """The sum over ranks that hold pieces of one value, replicated, as a differentiable function of this rank's."""
    return _Linear.apply(functools.partial(axis.sum, tag="global_norm"), torch.clone, part)
