"""The regions of a trace: the call of one is a node of autograd, and so is its pullback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from fzero.base import private
from fzero.graph import of_torch, operators
from fzero.graph.nodes import result_of
from fzero.graph.operators import like
from fzero.graph.trace import Traced

T = TypeVar("T")


class Inline(Exception):
    """The function differentiates a region itself: its operators are to be part of the function's own graph."""


def traced(run: Callable[[bool], T]) -> T:
    """`run(inline)`, which says whether what would be regions is part of the function's own graph."""
    try:
        return run(False)
    except Inline:
        return run(True)


class Regions:
    """Those of one trace, by number.

    Args:
        mode: in which tensors have no values.
        inline: whether what would be a region is part of the function's own graph.

    Attributes:
        silent: of those that are pulled back the places among their cotangents of what is zero in each pullback.
    """

    def __init__(self, mode: AbstractContextManager[object], decompositions: of_torch.Table, inline: bool) -> None:
        self.mode, self.decompositions, self.inline = mode, decompositions, inline
        self.traced: list[Traced] = []
        self.silent: dict[int, set[int]] = {}

    def called(self, region: int) -> list[torch.Tensor]:
        return [like(x.meta["val"]) for x in result_of(self.traced[region].forward)]

    def pulled(self, region: int) -> list[torch.Tensor]:
        return [like(x.meta["val"]) for x in result_of(self.traced[region].pullback) if x is not None]

    def call_region(
        self, number: int, wanted: Sequence[int], operands: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """The outputs of a region, differentiable by the operands in the places `wanted`."""
        return _Called.apply(self, number, tuple(wanted), *operands)[: self.traced[number].outputs]


class _Called(torch.autograd.Function):
    """`apply(regions, number, wanted, *operands)`: outputs, and what the pullback is given of the forward."""

    @staticmethod
    def forward(  # type: ignore[override]
        regions: Regions, number: int, wanted: Sequence[int], *operands: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return tuple(operators.REGION([*operands], number))

    @staticmethod
    def setup_context(ctx: private.Context, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.regions, ctx.number, ctx.wanted, *operands = inputs
        traced: Traced = ctx.regions.traced[ctx.number]
        ctx.count = len(operands)
        ctx.save_for_backward(*[output[i] if i >= 0 else operands[-1 - i] for i in traced.saved])
        ctx.metas = [(output[i].shape, output[i].dtype, output[i].device) for i in traced.real]
        ctx.mark_non_differentiable(*[x for i, x in enumerate(output) if i not in traced.real])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: private.Context, *cotangents: torch.Tensor | None) -> object:  # type: ignore[override]
        levels = of_torch.grad_levels()
        mapped = any([x is not None and private.is_mapped(x) for x in cotangents])  # as in torch.func.jacrev
        if levels > 2 or (levels == 0 and torch.is_grad_enabled()) or mapped:
            raise Inline
        regions: Regions = ctx.regions
        traced, own = regions.traced[ctx.number], [cotangents[i] for i in regions.traced[ctx.number].real]
        silent = {place for place, x in enumerate(own) if x is None}
        regions.silent[ctx.number] = regions.silent.get(ctx.number, silent) & silent
        given = [
            torch.zeros(shape, dtype=dtype, device=device) if x is None else x.contiguous()
            for x, (shape, dtype, device) in zip(own, ctx.metas, strict=True)
        ]
        found = iter(operators.PULL([*ctx.saved_tensors, *given], ctx.number))
        out: list[torch.Tensor | None] = [None] * ctx.count
        for i, reached in zip(ctx.wanted, traced.reached, strict=True):
            out[i] = next(found) if reached else None
        return None, None, None, *out

    @staticmethod
    def vmap(  # type: ignore[override]
        info: Any,
        in_dims: Sequence[int | None],
        regions: Any,  # of steps: units are none under a map
        number: int,
        wanted: Sequence[int],
        *operands: torch.Tensor,
    ) -> object:
        every, dims = regions.mapped(number, in_dims[3:], operands, wanted, info.randomness)
        return regions.call_region(every, wanted, operands), tuple(dims)
