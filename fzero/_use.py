"""How a buffer is used: the maps from a stored shard to the full buffer in compute dtype, differentiable at any level.

Gathering a shard and reduce-scattering a cotangent are maps of the *mean* inner product over ranks, so that each is the
other's transpose (ZeRO, Rajbhandari et al. 2020, section 5).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fzero import _private
from fzero._collectives import Axis
from fzero._formats import Blocks, Stored, decode, encode
from fzero._node import first_order

_BLOCKS = Blocks()


@dataclass(eq=False, slots=True)
class Use:
    """How one buffer is used: its dtypes, its axis, and the value at hand where there is one. Opaque to pytrees.

    Attributes:
        shard: this rank's shard as it is stored.
        gather8: whether params travel in 8 bits.
        wire: dtype in which a full cotangent travels.
        stands: whether the differentiated tensor only stands for the shard (sums of another dtype, encoded params).
        held: the full buffer in compute dtype, where it is at hand (ZeRO-1 and 2).
    """

    tag: str
    axis: Axis
    shard: Stored
    compute: torch.dtype
    reduce: torch.dtype
    grad: torch.dtype
    wire: torch.dtype
    stands: bool = False
    gather8: bool = False
    held: torch.Tensor | None = None

    def value(self, primal: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """The full buffer in compute dtype, and whether it is a new one (that may be freed)."""
        if self.held is not None:
            return self.held, False
        if self.gather8:
            full = torch.empty(self.shard.numel() * self.axis.size, dtype=self.compute, device=self.shard.device)
            self.start_into(full)()
            return full, True
        shard = self.shard.to(self.compute) if self.stands else primal.to(self.compute)
        if self.axis.size == 1:
            return shard, shard is not primal and all(shard is not part for part in self.shard.parts)
        return self.axis.gather(shard, self.tag), True

    @property
    def trivial(self) -> bool:
        """Whether the stored buffer is used as it is, and its cotangent is its grad."""
        stored = self.shard.dtype
        alone = self.held is None and not self.stands and not self.gather8 and self.axis.ranks == 1
        return alone and self.compute == self.grad == self.reduce == stored

    @property
    def gathers(self) -> bool:
        return self.held is None and self.axis.size > 1

    def start_into(self, full: torch.Tensor) -> Callable[[], None]:
        """Begins to gather the stored shard into `full`."""
        return start_gather(self.axis, full, self.shard, self.gather8, self.tag)

    def spread(self, shard: torch.Tensor) -> torch.Tensor:
        return self.axis.gather(shard.to(self.compute), self.tag)

    def collect(self, full: torch.Tensor) -> torch.Tensor:
        return self.axis.reduce_scatter(full.to(self.wire), self.tag, self.reduce)

    def apply(self, primal: torch.Tensor) -> torch.Tensor:
        """The full buffer as a differentiable function of the shard."""
        if self.trivial:
            return primal
        return _value(self, primal)


def start_gather(axis: Axis, full: torch.Tensor, shard: Stored, in_8_bits: bool, tag: str) -> Callable[[], None]:
    """Begins to fill a full buffer with all ranks' shards, which may travel in 8 bits."""
    if not in_8_bits:
        return axis.start_gather(full, shard.to(full.dtype), tag)
    codes, scales = encode(_BLOCKS, shard.to(shard.dtype))
    sent = torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)])
    received = sent.new_empty(sent.numel() * axis.size)
    wait = axis.start_gather(received, sent, tag)

    def finish() -> None:
        wait()
        cut = codes.numel()
        with _private.preserve_version([full]), torch.no_grad():
            for target, wire in zip(full.chunk(axis.size), received.chunk(axis.size), strict=True):
                target.copy_(decode(_BLOCKS, (wire[:cut].view(torch.int8), wire[cut:].view(torch.int16)), full.dtype))

    return finish


def _linear(name: str, forward: Any, transposed: Any) -> Any:
    """A Function for a linear map of a buffer along dim 0, which any functorch level may transform."""

    class Map(torch.autograd.Function):
        @staticmethod
        def forward(use: Use, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            out = forward(use, tensor)
            return out.clone() if out is tensor else out

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.use = inputs[0]

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> Any:  # type: ignore[override]
            return None, transposed().apply(ctx.use, cotangent)

        @staticmethod
        def jvp(ctx: Any, _: Any, tangent: torch.Tensor) -> Any:  # type: ignore[override]
            return Map.apply(ctx.use, tangent)

        @staticmethod
        def vmap(info: Any, in_dims: Any, use: Use, tensor: torch.Tensor) -> Any:  # type: ignore[override]
            return Map.apply(use, tensor.movedim(in_dims[1], -1).contiguous()), -1

    Map.__name__ = Map.__qualname__ = name
    return Map


_Spread = _linear("Spread", lambda use, shard: use.spread(shard), lambda: _Collect)
_Collect = _linear("Collect", lambda use, full: use.collect(full), lambda: _Spread)


# over a sharded axis and its replicas: the sum of the shards' parts on every rank, the mean of the ranks' cotangents
_Summed = _linear("Summed", lambda axis, part: axis.sum(part, "global_norm"), lambda: _Averaged)
_Averaged = _linear("Averaged", lambda axis, full: axis.mean(full, "global_norm"), lambda: _Summed)


def spread(use: Use, shard: torch.Tensor) -> torch.Tensor:
    """The full buffer as a differentiable function of this shard."""
    return _Spread.apply(use, shard)


def summed(axis: Axis, part: torch.Tensor) -> torch.Tensor:
    """The sum over shards as a differentiable function of this rank's part."""
    return _Summed.apply(axis, part)


class _Value(torch.autograd.Function):
    """The buffer in use: its value may be at hand, its derivative is that of spreading the shard."""

    @staticmethod
    def forward(use: Use, primal: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        full, _ = use.value(primal)
        return full.view(full.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.use = inputs[0]

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:  # type: ignore[override]
        return None, ctx.use.collect(cotangent) if first_order() else _Collect.apply(ctx.use, cotangent)

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: torch.Tensor) -> Any:  # type: ignore[override]
        return _Spread.apply(ctx.use, tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, use: Use, primal: torch.Tensor) -> Any:  # type: ignore[override]
        return _Spread.apply(use, primal.movedim(in_dims[1], -1).contiguous()), -1


_value = _private.direct(_Value)
