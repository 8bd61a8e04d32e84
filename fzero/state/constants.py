"""Verbs that cannot be transformed: what torch.func differentiates or maps, they would take for a constant."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from fzero.base import private, pytree
from fzero.state.sharded import is_sharded


def constants(who: str, **arguments: object) -> list[Any]:
    """The arguments with tensors as they are to everybody: none may take part in a transform around this call."""
    if not private.transforms():
        return list(arguments.values())
    out = []
    for argument, tree in arguments.items():
        tensors = list(_named_tensors(tree))
        for name, tensor in tensors:
            _refuse_transformed(who, f"{argument} ({name})" if name else argument, tensor)
        wrapped = any(private.is_wrapped(tensor) for _, tensor in tensors)
        out.append(pytree.map(lambda x: private.unwrapped(x) if pytree.is_tensor(x) else x, tree) if wrapped else tree)
    return out


def _refuse_transformed(who: str, argument: str, tensor: torch.Tensor) -> None:
    """Refuses a tensor that a transform differentiates or maps."""
    transform = private.transform_of(tensor)
    if transform is not None:
        instead = (
            "Call it outside of vmap, with the whole batch; for every example's gradient, call fz.per_example_grads."
            if transform == "torch.func.vmap"
            else "Take gradients with step.vjp, by params and by inputs, and second derivatives with fz.hvp; pass "
            "x.detach() where no gradient is wanted."
        )
        raise TypeError(
            f"{who}: got {argument} that {transform} transforms, expected tensors that are constants to it: {who} "
            f"cannot be transformed, and its result would have no derivative. {instead}"
        )


def refuse_captured(who: str, fn: object) -> None:
    """The same for what a function closes over, in its closure, its defaults, or bound by functools.partial."""
    if not private.transforms():
        return
    fn = getattr(fn, "__func__", fn)
    names = ("__defaults__", "__kwdefaults__", *(("args", "keywords") if isinstance(fn, functools.partial) else ()))
    given = [getattr(fn, name, None) for name in names]
    captured = pytree.flatten(given, is_leaf=lambda node: not isinstance(node, (dict, tuple, list)))[0]
    for cell in getattr(fn, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            captured.append(cell.cell_contents)
    for value in captured:
        if isinstance(value, torch.Tensor):
            _refuse_transformed(who, f"fn, which closes over a tensor of shape {tuple(value.shape)},", value)


def _named_tensors(tree: object) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a tree, each with its path, or that of a leaf that its buffer holds."""
    for name, node in zip(*pytree.named_leaves(tree, is_leaf=is_sharded)[:2], strict=True):
        for key in node.keys if is_sharded(node) else ():
            name = f"leaf {node.layout.groups[key].slots[0].path!r}"
            yield from [(name, x) for x in (*node.stored(key).parts, node.held.get(key)) if x is not None]
        if isinstance(node, torch.Tensor):
            yield name, node
