"""`Node` where one vjp alone differentiates: the same node, made in as few steps as torch allows."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from fzero.base import private
from fzero.base.node import Node, Op, Tensors, own_jointly

_functorch = torch._C._functorch  # type: ignore[attr-defined]


class _AtNoLevel:
    """Inside, the functorch level that is alone is not active, and forward-mode derivatives work."""

    __slots__ = ("_forward", "_saved")

    def __enter__(self) -> None:
        self._saved = _functorch.pop_dynamic_layer_stack()
        self._forward = torch._C._is_fwd_grad_enabled()
        torch._C._set_fwd_grad_enabled(True)

    def __exit__(self, *_: object) -> None:
        torch._C._set_fwd_grad_enabled(self._forward)
        _functorch.push_dynamic_layer_stack(self._saved)


class QuickOp(Op):
    """An op that knows what is differentiated of its tensors, and which of its outputs are real once it has run."""

    wanted: Sequence[int]
    real: Sequence[int]


class _AtLevel(torch.autograd.function._SingleLevelFunction):
    """`Node` of a call under a single vjp, in as few steps as torch allows; `op.wanted` says what is differentiated."""

    @staticmethod
    def forward(level: int, op: QuickOp, *tensors: torch.Tensor) -> Tensors:  # type: ignore[override]
        plain = [private.below_level(x, level) for x in tensors]
        with _AtNoLevel():
            out = op.run(tuple([x.detach() for x in plain]), op.wanted)  # or a graph inside would lead outside
        return tuple([_functorch._wrap_for_grad(x, level) for x in out])

    @staticmethod
    def setup_context(ctx: private.Context, inputs: tuple[int, QuickOp, *Tensors], output: Tensors) -> None:
        op, tensors = inputs[1], inputs[2:]
        ctx.op, ctx.count, ctx.outputs, ctx.real = op, len(tensors), len(output), op.real
        op.node = weakref.ref(private.node_of(ctx))  # type: ignore[assignment]
        stand_ins = op.stand_ins
        ctx.save_for_backward(*([stand_ins.get(i, x) for i, x in enumerate(tensors)] if stand_ins else tensors))
        ctx.meta = [(output[i].shape, output[i].dtype, output[i].device) for i in op.real]
        if len(op.real) < len(output):
            ctx.mark_non_differentiable(*[x for i, x in enumerate(output) if i not in op.real])
        ctx.set_materialize_grads(False)

    backward = Node.backward  # type: ignore[assignment]


def apply_at(level: int, op: QuickOp, tensors: Sequence[torch.Tensor]) -> Tensors:
    """Applies an op under the vjp that is alone all that differentiates here (`private.single_level`)."""
    outs: Tensors = private.apply_at_level(_AtLevel, level, op, *tensors)
    own_jointly(outs)
    return outs
