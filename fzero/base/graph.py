"""Walks over plain autograd's graph: gradients, what it begins with, what depends on what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def gradients(
    out: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None],
    retain_graph: bool,
) -> Sequence[torch.Tensor | None]:
    """torch.autograd.grad over those outputs that depend on anything; None for an unused leaf."""
    live = [(o, c.to(o.dtype)) for o, c in zip(out, cotangents, strict=True) if c is not None and o.requires_grad]
    if not live or not leaves:
        return [None] * len(leaves)
    return torch.autograd.grad(
        [o for o, _ in live], list(leaves), [c for _, c in live], retain_graph=retain_graph, allow_unused=True
    )


def refuse_foreign_leaves(
    out: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    is_foreign: Callable[[torch.Tensor], bool] = lambda leaf: True,
    text: Callable[[torch.Tensor], str] | None = None,
) -> None:
    """A tensor that a unit closed over would get a silent zero gradient: look for graph leaves that are not ours.

    Args:
        is_foreign: of a leaf that is not among `leaves`, whether it is not one that the function made itself.
        text: what is said of one.
    """
    ours = {id(leaf) for leaf in leaves}
    todo = [o.grad_fn for o in out if o.grad_fn is not None]
    seen = set(todo)
    for node in todo:  # which grows: a fraction of a microsecond each
        if following := node.next_functions:
            for other, _ in following:
                if other is not None and other not in seen:
                    seen.add(other)
                    todo.append(other)
            continue
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in ours and is_foreign(variable):
            raise ValueError((text or closed_over)(variable))


def edges_to(out: Sequence[torch.Tensor]) -> set[tuple[Any, int]]:
    """What tensors depend on in their graph: (node, which of its outputs)."""
    todo: list[tuple[Any, int]] = [(x.grad_fn, x.output_nr) for x in out if x.grad_fn is not None]
    seen, nodes = set(todo), {node for node, _ in todo}
    for node, _ in todo:
        for edge in node.next_functions:
            if edge[0] is not None:
                seen.add(edge)
                if edge[0] not in nodes:
                    nodes.add(edge[0])
                    todo.append(edge)
    return seen


def joint_outputs(out: Sequence[torch.Tensor]) -> dict[int, frozenset[int]]:
    """Of the outputs of one run: each -> those others that depend on it, in its graph."""
    real = {i: (x.grad_fn, x.output_nr) for i, x in enumerate(out) if x.grad_fn is not None}
    reached = {i: edges_to((out[i],)) for i in real} if len(real) > 1 else {}
    found = {i: frozenset(j for j in reached if j != i and edge in reached[j]) for i, edge in real.items()}
    return {i: others for i, others in found.items() if others}


def closed_over(tensor: torch.Tensor) -> str:
    return (
        f"A unit closes over a tensor of shape {tuple(tensor.shape)} that is being differentiated, where it cannot be "
        "seen (an object of another library, a cache); its gradient would be lost. Pass this tensor to the unit's "
        "call, or detach() it where no gradient is wanted."
    )
