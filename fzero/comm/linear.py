"""Collectives as differentiable linear maps, each with its transpose, at any functorch level."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from fzero.base import private
from fzero.comm.axis import Axis


@dataclass(eq=False, slots=True)
class Wire:
    """How one buffer travels between ranks. Opaque to pytrees.

    Attributes:
        compute: dtype of the full buffer.
        reduce: dtype in which its cotangents are summed.
        wire: dtype in which a full cotangent travels.
    """

    tag: Hashable
    axis: Axis
    compute: torch.dtype
    reduce: torch.dtype
    wire: torch.dtype

    def spread(self, shard: torch.Tensor) -> torch.Tensor:
        return self.axis.gather(shard.to(self.compute), self.tag)

    def collect(self, full: torch.Tensor) -> torch.Tensor:
        return self.axis.reduce_scatter(full.to(self.wire), self.tag, self.reduce)


def _linear(name: str, forward: Any, transposed: Any) -> Any:
    """A Function for a linear map of a buffer along dim 0, which any functorch level may transform."""

    class Map(torch.autograd.Function):
        @staticmethod
        def forward(wire: Wire, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            out = forward(wire, tensor)
            return out.clone() if out is tensor else out

        @staticmethod
        def setup_context(ctx: private.Context, inputs: Any, output: object) -> None:
            ctx.wire = inputs[0]

        @staticmethod
        def backward(ctx: private.Context, cotangent: torch.Tensor) -> Any:  # type: ignore[override]
            return None, transposed().apply(ctx.wire, cotangent)

        @staticmethod
        def jvp(ctx: private.Context, _: object, tangent: torch.Tensor) -> Any:  # type: ignore[override]
            return Map.apply(ctx.wire, tangent)

        @staticmethod
        def vmap(info: object, in_dims: Any, wire: Wire, tensor: torch.Tensor) -> Any:  # type: ignore[override]
            return Map.apply(wire, tensor.movedim(in_dims[1], -1).contiguous()), -1

    Map.__name__ = Map.__qualname__ = name
    return Map


Spread = _linear("Spread", lambda wire, shard: wire.spread(shard), lambda: Collect)


Collect = _linear("Collect", lambda wire, full: wire.collect(full), lambda: Spread)


# over a sharded axis and its replicas: the sum of the shards' parts on every rank, the mean of the ranks' cotangents
_Summed = _linear("Summed", lambda axis, part: axis.sum(part, "global_norm"), lambda: _Averaged)


_Averaged = _linear("Averaged", lambda axis, full: axis.mean(full, "global_norm"), lambda: _Summed)


def spread(wire: Wire, shard: torch.Tensor) -> torch.Tensor:
    """The full buffer as a differentiable function of this shard."""
    return Spread.apply(wire, shard)


def summed(axis: Axis, part: torch.Tensor) -> torch.Tensor:
    """The sum over shards as a differentiable function of this rank's part."""
    return _Summed.apply(axis, part)
