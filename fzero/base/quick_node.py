"""`Node` where no transform of torch.func is active: the same node, made in as few steps as torch allows."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from fzero.base import private
from fzero.base.node import Node, Op, Tensors, own_jointly


class QuickOp(Op):
    """An op that knows what is differentiated of its tensors, and which of its outputs are real once it has run."""

    wanted: Sequence[int]
    real: Sequence[int]


class _Quick(torch.autograd.function._SingleLevelFunction):
    """`Node` of a call under plain autograd; `wanted` says what is differentiated."""

    @staticmethod
    def forward(op: QuickOp, wanted: Sequence[int], *tensors: torch.Tensor) -> Tensors:  # type: ignore[override]
        enabled = torch._C._is_fwd_grad_enabled()
        torch._C._set_fwd_grad_enabled(True)  # which a Function's forward is without
        try:
            return op.run(tuple([x.detach() for x in tensors]), wanted)  # or a graph inside would lead outside
        finally:
            torch._C._set_fwd_grad_enabled(enabled)

    @staticmethod
    def setup_context(ctx: private.Context, inputs: tuple[QuickOp, Sequence[int], *Tensors], output: Tensors) -> None:
        op, tensors = inputs[0], inputs[2:]
        ctx.op, ctx.count, ctx.outputs, ctx.real = op, len(tensors), len(output), op.real
        op.node = weakref.ref(private.node_of(ctx))  # type: ignore[assignment]
        stand_ins = op.stand_ins
        ctx.save_for_backward(*([stand_ins.get(i, x) for i, x in enumerate(tensors)] if stand_ins else tensors))
        ctx.meta = [(output[i].shape, output[i].dtype, output[i].device) for i in op.real]
        if len(op.real) < len(output):
            ctx.mark_non_differentiable(*[x for i, x in enumerate(output) if i not in op.real])
        ctx.set_materialize_grads(False)

    backward = Node.backward  # type: ignore[assignment]


def apply_quickly(op: QuickOp, tensors: Sequence[torch.Tensor]) -> Tensors:
    """Applies an op where no transform is active."""
    outs: Tensors = _Quick.apply(op, op.wanted, *tensors)  # type: ignore[assignment]
    own_jointly(outs)
    return outs
