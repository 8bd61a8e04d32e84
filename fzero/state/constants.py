"""Verbs that cannot be transformed: what torch.func differentiates or maps, they would take for a constant."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from fzero.base import private, pytree
from fzero.state.sharded import is_sharded

_INSTEAD = {
    "torch.func.vmap": "Call it outside of vmap, with the whole batch; for every example's gradient, call "
    "fz.per_example_grads",
}
_OTHERWISE = (
    "Take gradients with step.vjp, by params and by inputs, and second derivatives with fz.hvp; pass x.detach() where "
    "no gradient is wanted"
)


def constants(who: str, argument: str, tree: object) -> Any:
    """The tree with its tensors as they are to everybody: none may take part in a transform around this call.

    Raises:
        TypeError: one does.
    """
    if not private.transforms():
        return tree
    found = False
    for name, leaf in _named_tensors(tree):
        transform = private.transform_of(leaf)
        if transform is not None:
            at = f" ({name})" if name else ""
            raise TypeError(
                f"{who}: got {argument}{at} that {transform} transforms, expected tensors that are constants to it: "
                f"{who} cannot be transformed, and its result would have no derivative. "
                f"{_INSTEAD.get(transform, _OTHERWISE)}."
            )
        found = found or private.is_wrapped(leaf)
    if not found:
        return tree
    return pytree.map(lambda x: private.unwrapped(x) if isinstance(x, torch.Tensor) else x, tree)


def refuse_captured(who: str, fn: object) -> None:
    """The same for what a function closes over, whose outputs would have no derivative by it either."""
    if private.transforms():
        for value in _captured(fn):
            if isinstance(value, torch.Tensor):
                constants(who, f"fn, which closes over a tensor of shape {tuple(value.shape)},", value)


def _captured(fn: object) -> Iterator[Any]:
    """What a function holds on to: in its closure, its defaults, or bound by functools.partial."""
    fn = getattr(fn, "__func__", fn)
    for cell in getattr(fn, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents
    if isinstance(fn, functools.partial):
        yield fn.func
        yield from _contents((fn.args, fn.keywords))
    yield from _contents((getattr(fn, "__defaults__", None), getattr(fn, "__kwdefaults__", None)))


def _contents(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _contents(item)
    else:
        yield value


def _named_tensors(tree: object) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a tree, each with its path, or that of a leaf that its buffer holds."""
    out = []
    names, nodes, _ = pytree.named_leaves(tree, is_leaf=is_sharded)
    for name, node in zip(names, nodes, strict=True):
        if is_sharded(node):
            for key in node.keys:
                name = f"leaf {node.layout.groups[key].slots[0].path!r}"
                out += [(name, x) for x in (*node.stored(key).parts, node.held.get(key)) if x is not None]
        elif isinstance(node, torch.Tensor):
            out.append((name, node))
    return out
