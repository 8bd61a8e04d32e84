"""The plain float64 step, written with torch alone: what everything is held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


def adamw_steps(
    fn: Callable[..., torch.Tensor],
    params: Any,
    batches: Sequence[tuple[torch.Tensor, ...]],
    steps: int,
    lr: float = 1e-2,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    max_norm: float | None = None,
    frozen: Callable[[int], bool] = lambda index: False,
) -> tuple[Any, list[float], list[float]]:
    """AdamW on the mean of `fn(params, *batch)` over the batches (one per rank), with clipping by global norm.

    Returns:
        params after `steps` updates, the losses and the gradient norms before clipping.
    """
    leaves, spec = pytree.tree_flatten(params)
    leaves = [leaf.detach().clone() for leaf in leaves]
    mu = [torch.zeros_like(leaf) for leaf in leaves]
    nu = [torch.zeros_like(leaf) for leaf in leaves]
    trained = [i for i in range(len(leaves)) if not frozen(i)]
    losses, norms = [], []
    for count in range(1, steps + 1):
        inputs = [leaf.clone().requires_grad_(i in trained) for i, leaf in enumerate(leaves)]
        loss = torch.stack([fn(pytree.tree_unflatten(inputs, spec), *batch) for batch in batches]).mean()
        grads = torch.autograd.grad(loss, [inputs[i] for i in trained], allow_unused=True)
        grads = [torch.zeros_like(leaves[i]) if g is None else g for i, g in zip(trained, grads, strict=True)]
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt().item()
        losses.append(loss.item())
        norms.append(norm)
        factor = min(1.0, max_norm / norm) if max_norm is not None else 1.0
        for i, g in zip(trained, grads, strict=True):
            g = g * factor
            mu[i] = b1 * mu[i] + (1 - b1) * g
            nu[i] = b2 * nu[i] + (1 - b2) * g * g
            step = (mu[i] / (1 - b1**count)) / ((nu[i] / (1 - b2**count)).sqrt() + eps)
            leaves[i] = leaves[i] - lr * (step + weight_decay * leaves[i])
    return pytree.tree_unflatten(leaves, spec), losses, norms
