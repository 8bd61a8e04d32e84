"""Gradients of the passes of a step's microbatches, pulled back in each way there is, and those of plain torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import fzero as fz
from fzero.engine.passes import Passes

F64 = torch.float64
Params = dict[str, torch.Tensor]
HOW = ("backward", "early", "halves")


def drawn(*shape: int, dtype: torch.dtype = F64, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)) / 4


def pulled(
    fn: Callable[..., Any] | fz.Step,
    params: Params,
    parts: Sequence[torch.Tensor],
    how: str = "backward",
    cotangent: Callable[[Any], Any] = torch.ones_like,
    after: Callable[..., object] = lambda *_: None,
) -> fz.Sharded:
    """The sum of the gradients.

    Args:
        after: is called with what is outside of the library between the halves of a pullback.
    """
    step = fn if isinstance(fn, fz.Step) else fz.train_step(fn, fz.sgd(1.0))
    passes = Passes(step, step.init(params), len(parts))
    for i, part in enumerate(parts):
        output, _ = passes.forward(i, (part,), (0,))
        given, rest = cotangent(output), functools.partial(passes.params, i)
        if how == "backward":
            found, rest = passes.backward(i, given), lambda: None
        elif how == "early":
            found, rest = passes.early(i, given)
        else:
            found = passes.inputs(i, given)
        after(given, found[0], output)
        rest()
    passes.reduce()
    return passes.grads()


def by_torch(fn: Callable[..., Any], params: Params, parts: Sequence[torch.Tensor], scale: float = 1.0) -> Params:
    """Of each microbatch apart: what one does to a leaf is nothing to the next."""
    total = {name: torch.zeros_like(own) for name, own in params.items()}
    for part in parts:
        leaves = {name: own.clone().requires_grad_() for name, own in params.items()}
        out = fn(leaves, part.clone())
        out.backward(torch.ones_like(out) * scale)
        total = {k: v if (grad := leaves[k].grad) is None else v + grad for k, v in total.items()}
    return total
